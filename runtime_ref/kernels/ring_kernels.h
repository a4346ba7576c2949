// What an app calls.
#pragma once

// Methods loaded from now on attend with these kernels (1) or with those that they replaced (0). Returns whether they
// attend with these.
extern "C" int ring_use_attention(int use);
