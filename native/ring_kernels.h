// What an app calls.
#pragma once

// Methods loaded from now on run on these kernels (1) or on those that they replaced (0). Returns whether they run on
// these.
extern "C" int ring_use_kernels(int use);
