// The largest of many floats.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "vectors.h"

namespace ring {

constexpr int64_t kShortest = 16, kLongest = 128;  // floats of a block

// The `count` largest of `size` floats, largest first where `sorted`, of equal ones the first, and where they stand.
// False, and nothing written, where one is NaN, or `count` is above a 32nd of `size`: looking at every float is as good
// then.
//
// Blocks with a large float are few: if `count` blocks have one of t or more, what is below t is none of the `count`
// largest. A block is one lane of as many vectors as it has floats, which stand one after the other.
template <typename Parallel>
bool top(
    const float* from, int64_t size, int64_t count, bool sorted, float* values, int64_t* places, Parallel parallel) {
  if (count < 1) return false;
  const int64_t length = std::clamp(size / (4 * count), kShortest, kLongest), chunk = length * kWidth;
  const int64_t chunks = size / chunk, blocks = chunks * kWidth;
  if (2 * count > blocks) return false;
  const int64_t kTask = std::max<int64_t>(1, (1 << 14) / chunk);  // chunks
  std::vector<float> most(blocks);
  const int64_t tasks = (chunks + kTask - 1) / kTask;
  std::vector<char> nans(tasks);
  parallel(tasks, [&](int64_t task) {
    IntVec odd{};
    for (int64_t c = task * kTask; c < std::min(chunks, (task + 1) * kTask); ++c) {
      Vec best = load(from + c * chunk);
      for (int64_t v = 0; v < length; ++v) {
        const Vec next = load(from + c * chunk + v * kWidth);
        odd |= next != next;
        best = larger(best, next);
      }
      store(most.data() + c * kWidth, best);
    }
    int32_t any = 0;
    for (int lane = 0; lane < kWidth; ++lane) any |= odd[lane];
    nans[task] = any != 0;
  });
  const float* const rest = from + chunks * chunk;
  if (std::any_of(nans.begin(), nans.end(), [](char nan) { return nan != 0; }) ||
      std::any_of(rest, from + size, [](float value) { return value != value; })) {
    return false;
  }

  std::vector<float> ordered(most);
  std::nth_element(ordered.begin(), ordered.begin() + (count - 1), ordered.end(), std::greater<float>());
  const float least = ordered[count - 1];
  struct Found {
    float value;
    int64_t place;
  };
  std::vector<Found> found;
  found.reserve(4 * count);
  const auto look = [&](int64_t i) {
    if (from[i] >= least) found.push_back({from[i], i});
  };
  for (int64_t b = 0; b < blocks; ++b) {
    if (most[b] < least) continue;
    const int64_t first = b / kWidth * chunk + b % kWidth;
    for (int64_t v = 0; v < length; ++v) look(first + v * kWidth);
  }
  for (int64_t i = chunks * chunk; i < size; ++i) look(i);
  const auto before = [](const Found& a, const Found& b) {
    return a.value > b.value || (a.value == b.value && a.place < b.place);
  };
  if (count < static_cast<int64_t>(found.size())) {
    std::nth_element(found.begin(), found.begin() + (count - 1), found.end(), before);
  }
  if (sorted) std::sort(found.begin(), found.begin() + count, before);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = found[i].value;
    places[i] = found[i].place;
  }
  return true;
}

}  // namespace ring
