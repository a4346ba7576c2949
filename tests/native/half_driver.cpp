// Prints how many float16s, and floats around them, are converted otherwise one by one than as vectors.
#include "half.h"
#include <cmath>
#include <cstdio>
using namespace ring;
int main() {
  long wrong = 0;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    Half halves[kWidth];
    for (Half& half : halves) half.bits = bits;
    float lanes[kWidth];
    store(lanes, load(halves));
    const float one = to_float(halves[0]);
    wrong += !(one == lanes[0] || (std::isnan(one) && std::isnan(lanes[0])));
    for (int32_t off = -0x1001; off <= 0x1001; off += 0x1001) {
      uint32_t image;
      std::memcpy(&image, &one, 4);
      image += off;
      float value;
      std::memcpy(&value, &image, 4);
      if (std::isnan(value)) continue;
      for (float& lane : lanes) lane = value;
      store(halves, load(lanes));
      Half half;
      from_float(value, &half);
      wrong += half.bits != halves[kWidth - 1].bits;
      halves[0].bits = bits;
    }
  }
  std::printf("%ld", wrong);
}
