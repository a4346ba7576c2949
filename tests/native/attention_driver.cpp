// Attends to cases from standard input and writes the results, as bytes of this machine: what tests compare wherever
// these kernels can be compiled and run, if only in an emulator, without ExecuTorch.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "attention.h"
#include "half.h"

namespace {

struct Case {
  int64_t kind;  // 0: float, 1: Half, 2: int8
  int64_t query_len, rows, num_heads, num_kv_heads, head_dim, start, causal, masked;
  double scale;
};

template <typename T>
std::vector<T> take(int64_t count) {
  std::vector<T> out(count);
  if (std::fread(out.data(), sizeof(T), count, stdin) != static_cast<size_t>(count)) std::exit(1);
  return out;
}

template <typename E>
struct Given {
  Given(int64_t rows, int64_t head_dim) : numbers(take<E>(rows * head_dim)) {}
  const E* rows() const { return numbers.data(); }
  std::vector<E> numbers;
};

template <>
struct Given<int8_t> {
  Given(int64_t rows, int64_t dim) : head_dim(dim), numbers(take<int8_t>(rows * dim)), scales(take<float>(rows)) {}
  ring::Int8Rows rows() const { return {numbers.data(), scales.data(), head_dim}; }
  int64_t head_dim;
  std::vector<int8_t> numbers;
  std::vector<float> scales;
};

template <typename E, typename Out>
void attend(const Case& c) {
  const Given<E> query(c.query_len * c.num_heads, c.head_dim), keys(c.rows * c.num_kv_heads, c.head_dim),
      values(c.rows * c.num_kv_heads, c.head_dim);
  const std::vector<float> mask = take<float>(c.masked ? c.query_len * c.rows : 0);
  std::vector<Out> out(c.query_len * c.num_heads * c.head_dim);
  ring::attend(
      ring::Attention<E>{
          c.query_len, c.rows, c.num_heads, c.num_kv_heads, c.head_dim, query.rows(), keys.rows(), values.rows(),
          c.masked ? mask.data() : nullptr, c.start, c.causal != 0, static_cast<float>(c.scale), out.data()},
      [](int64_t count, const std::function<void(int64_t)>& task) {
        for (int64_t i = 0; i < count; ++i) task(i);
      });
  std::fwrite(out.data(), sizeof(Out), out.size(), stdout);
}

}  // namespace

int main() {
  for (Case c; std::fread(&c, sizeof(c), 1, stdin) == 1;) {
    if (c.kind == 0) attend<float, float>(c);
    else if (c.kind == 1) attend<ring::Half, ring::Half>(c);
    else attend<int8_t, float>(c);
  }
}
