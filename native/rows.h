// Rows of int8 weights with a scale a group, times a vector of floats.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace ring {

// out[n] = sum over groups g of scales[n, g] * (weight[n, g] . x[g]). A group is a multiple of `kWidth` columns.
template <typename Parallel>
void rows_times(
    const int8_t* weight, const float* scales, const float* x, float* out, int64_t rows, int64_t columns,
    int64_t groups, Parallel parallel) {
  constexpr int64_t kTask = 128;
  const int64_t size = columns / groups;
  parallel((rows + kTask - 1) / kTask, [&](int64_t task) {
    const int64_t end = rows < (task + 1) * kTask ? rows : (task + 1) * kTask;
    for (int64_t n = task * kTask; n < end; ++n) {
      const int8_t* row = weight + n * columns;
      Vec sum{};
      for (int64_t g = 0; g < groups; ++g) {
        Vec own{};
        for (int64_t i = g * size; i < (g + 1) * size; i += kWidth) own += load(row + i) * load(x + i);
        sum += own * splat(scales[n * groups + g]);
      }
      float total = 0;
      for (int lane = 0; lane < kWidth; ++lane) total += sum[lane];
      out[n] = total;
    }
  });
}

}  // namespace ring
