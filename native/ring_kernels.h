// What an app calls.
#pragma once

// Methods loaded from now on run on these kernels (1) or on ExecuTorch's (0). Returns 1 if they run on these.
extern "C" int ring_use_kernels(int use);
