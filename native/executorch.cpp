// The kernels of this folder under the names that exported programs call.
//
// The registry holds one kernel per name, and ExecuTorch's own may be registered already, so its entry is replaced.
// What these kernels do not handle goes to the ones they replaced.
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "attention.h"
#include "half.h"
#include "ring_kernels.h"
#include "rows.h"
#include "top.h"

namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::Kernel;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::OpFunction;
using executorch::runtime::Span;

struct Replacement {
  const char* name;
  OpFunction own;
  OpFunction replaced;  // null where ExecuTorch has none
};

void custom_sdpa(KernelRuntimeContext& context, Span<EValue*> stack);
void custom_quantized_sdpa(KernelRuntimeContext& context, Span<EValue*> stack);
void to_dim_order_copy(KernelRuntimeContext& context, Span<EValue*> stack);
void topk(KernelRuntimeContext& context, Span<EValue*> stack);
void mixed_linear(KernelRuntimeContext& context, Span<EValue*> stack);

Replacement attention{"llama::custom_sdpa.out", custom_sdpa, nullptr};
Replacement quantized_attention{"llama::custom_quantized_sdpa.out", custom_quantized_sdpa, nullptr};
Replacement conversion{"dim_order_ops::_to_dim_order_copy.out", to_dim_order_copy, nullptr};
Replacement largest{"aten::topk.values", topk, nullptr};
Replacement rows{"quantized_decomposed::mixed_linear.out", mixed_linear, nullptr};

// Calls the kernel that was replaced.
void pass_on(const Replacement& to, KernelRuntimeContext& context, Span<EValue*> stack) {
  if (to.replaced) return to.replaced(context, stack);
  context.fail(Error::InvalidArgument);
}

// ExecuTorch's pool gives every thread an equal share of tasks. Ours differ in length, so each thread takes the next
// task when it is done.
void run_parallel(int64_t count, const std::function<void(int64_t)>& task) {
  std::atomic<int64_t> next{0};
  executorch::extension::parallel_for(0, count, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) task(i);
  });
}

bool contiguous(const Tensor& t) {
  return executorch::runtime::is_contiguous_dim_order(t.dim_order().data(), t.dim());
}

bool plain(const Tensor& t, ssize_t dim, ScalarType type) {
  return t.scalar_type() == type && t.dim() == dim && contiguous(t);
}

// The first arguments of both operators: query, key, value, start_pos, attn_mask, dropout_p, is_causal, scale.
struct Arguments {
  explicit Arguments(Span<EValue*> stack)
      : query(stack[0]->toTensor()), keys(stack[1]->toTensor()), values(stack[2]->toTensor()),
        start(stack[3]->toInt()), mask(stack[4]->toOptional<Tensor>()), dropout(stack[5]->toDouble()),
        causal(stack[6]->toBool()), scale(stack[7]->toOptional<double>()) {}

  const Tensor query, keys, values;
  const int64_t start;
  const std::optional<Tensor> mask;
  const double dropout;
  const bool causal;
  const std::optional<double> scale;

  // Whether our kernels take them, with everything but the mask of `type` and the result of `out_type`.
  bool ours(ScalarType type, const Tensor& out, ScalarType out_type) const {
    return plain(query, 4, type) && plain(keys, 4, type) && plain(values, 4, type) && plain(out, 4, out_type) &&
        query.size(0) == 1 && keys.size(0) == 1 && values.size(0) == 1 && keys.size(2) == values.size(2) &&
        keys.size(1) == values.size(1) && keys.size(3) == query.size(3) && values.size(3) == query.size(3) &&
        query.size(2) % keys.size(2) == 0 && query.size(1) > 0 && dropout == 0.0 &&
        (mask ? !causal && plain(*mask, 2, ScalarType::Float) && mask->size(0) == query.size(1) &&
                    mask->size(1) == keys.size(1)
              : start >= 0 && start + query.size(1) <= keys.size(1));
  }

  template <typename E>
  void attend(
      typename ring::Forms<E>::Rows own_query, typename ring::Forms<E>::Rows own_keys,
      typename ring::Forms<E>::Rows own_values, Tensor& out) const {
    ring::Attention<E> a;
    a.query_len = query.size(1);
    a.rows = keys.size(1);
    a.num_heads = query.size(2);
    a.num_kv_heads = keys.size(2);
    a.head_dim = query.size(3);
    a.query = own_query;
    a.keys = own_keys;
    a.values = own_values;
    a.mask = mask ? mask->const_data_ptr<float>() : nullptr;
    a.start = start;
    a.causal = causal;
    a.scale = scale ? static_cast<float>(*scale) : 1.0f / std::sqrt(static_cast<float>(a.head_dim));
    a.out = static_cast<typename ring::Forms<E>::Out>(out.mutable_data_ptr());
    ring::attend(a, run_parallel);
  }
};

template <typename E>
const E* data(const Tensor& t) {
  return static_cast<const E*>(t.const_data_ptr());
}

// custom_sdpa(..., *, out)
void custom_sdpa(KernelRuntimeContext& context, Span<EValue*> stack) {
  const Arguments given(stack);
  Tensor out = stack[8]->toTensor();
  const ScalarType type = given.query.scalar_type();
  if (!(type == ScalarType::Float || type == ScalarType::Half) || !given.ours(type, out, type)) {
    return pass_on(attention, context, stack);
  }
  if (executorch::runtime::resize_tensor(out, given.query.sizes()) != Error::Ok) {
    return context.fail(Error::InvalidArgument);
  }
  const auto attend = [&](auto one) {
    using E = decltype(one);
    given.attend<E>(data<E>(given.query), data<E>(given.keys), data<E>(given.values), out);
  };
  if (type == ScalarType::Float) attend(float{});
  else attend(ring::Half{});
}

// Whether `scales` holds a float for every row and head of `integers`, and `zero_points` a zero.
bool symmetric(const Tensor& integers, const EValue& zero_points, const EValue& scales) {
  const auto zeros = zero_points.toOptional<Tensor>(), own = scales.toOptional<Tensor>();
  if (!zeros || !own || !plain(*zeros, 4, ScalarType::Char) || !plain(*own, 4, ScalarType::Float)) return false;
  for (ssize_t i = 0; i < 3; ++i) {
    if (zeros->size(i) != integers.size(i) || own->size(i) != integers.size(i)) return false;
  }
  const int8_t* points = data<int8_t>(*zeros);
  return zeros->size(3) == 1 && own->size(3) == 1 &&
      (zeros->numel() == 0 || (points[0] == 0 && !std::memcmp(points, points + 1, zeros->numel() - 1)));
}

// custom_quantized_sdpa(..., q_zero_points=None, q_scales=None, k_zero_points=None, k_scales=None, v_zero_points=None,
// v_scales=None, is_seq_at_dim_2=False, *, out)
void custom_quantized_sdpa(KernelRuntimeContext& context, Span<EValue*> stack) {
  const Arguments given(stack);
  Tensor out = stack[15]->toTensor();
  if (!given.ours(ScalarType::Char, out, ScalarType::Float) || stack[14]->toBool() ||
      !symmetric(given.query, *stack[8], *stack[9]) || !symmetric(given.keys, *stack[10], *stack[11]) ||
      !symmetric(given.values, *stack[12], *stack[13])) {
    return pass_on(quantized_attention, context, stack);
  }
  if (executorch::runtime::resize_tensor(out, given.query.sizes()) != Error::Ok) {
    return context.fail(Error::InvalidArgument);
  }
  const auto rows = [&](const Tensor& integers, const EValue& scales) {
    return ring::Int8Rows{data<int8_t>(integers), scales.toTensor().const_data_ptr<float>(), integers.size(3)};
  };
  given.attend<int8_t>(
      rows(given.query, *stack[9]), rows(given.keys, *stack[11]), rows(given.values, *stack[13]), out);
}

constexpr int64_t kPiece = 1 << 14;

template <typename From, typename To>
void convert(const Tensor& in, Tensor& out) {
  const From* from = static_cast<const From*>(in.const_data_ptr());
  To* to = static_cast<To*>(out.mutable_data_ptr());
  const int64_t count = in.numel();
  if (count <= kPiece) return ring::convert(from, to, count);
  run_parallel((count + kPiece - 1) / kPiece, [&](int64_t piece) {
    const int64_t begin = piece * kPiece;
    ring::convert(from + begin, to + begin, std::min(kPiece, count - begin));
  });
}

// _to_dim_order_copy(self, non_blocking=False, dim_order=None, *, out): between float32 and float16, and from bytes to
// float32, in place of ExecuTorch's portable kernel, which converts one element at a time without vector instructions.
void to_dim_order_copy(KernelRuntimeContext& context, Span<EValue*> stack) {
  const Tensor in = stack[0]->toTensor();
  Tensor out = stack[3]->toTensor();
  const ScalarType from = in.scalar_type(), to = out.scalar_type();
  const bool widens = from == ScalarType::Half && to == ScalarType::Float;
  const bool narrows = from == ScalarType::Float && to == ScalarType::Half;
  const bool counts = from == ScalarType::Byte && to == ScalarType::Float;
  if (!(widens || narrows || counts) || in.dim() != out.dim() || !contiguous(in) || !contiguous(out)) {
    return pass_on(conversion, context, stack);
  }
  if (executorch::runtime::resize_tensor(out, in.sizes()) != Error::Ok) return context.fail(Error::InvalidArgument);
  if (widens) convert<ring::Half, float>(in, out);
  else if (counts) convert<uint8_t, float>(in, out);
  else convert<float, ring::Half>(in, out);
}

// topk(self, k, dim=-1, largest=True, sorted=True, *, values, indices), of one row: ExecuTorch's portable kernel makes
// a list of all elements and their places.
void topk(KernelRuntimeContext& context, Span<EValue*> stack) {
  const Tensor in = stack[0]->toTensor();
  const int64_t count = stack[1]->toInt(), dim = stack[2]->toInt();
  Tensor values = stack[5]->toTensor(), indices = stack[6]->toTensor();
  const auto pass = [&] { pass_on(largest, context, stack); };
  const ssize_t last = in.dim() - 1;
  if (last < 0 || (dim != -1 && dim != last) || in.size(last) != in.numel() || !stack[3]->toBool() ||
      !plain(in, in.dim(), ScalarType::Float) || !plain(values, in.dim(), ScalarType::Float) ||
      !plain(indices, in.dim(), ScalarType::Long) || count < 1 || count > in.numel()) {
    return pass();
  }
  const bool sorted = stack[4]->toBool();
  std::vector<float> found(count);
  std::vector<int64_t> places(count);
  if (!ring::top(data<float>(in), in.numel(), count, sorted, found.data(), places.data(), run_parallel)) return pass();
  std::vector<executorch::aten::SizesType> sizes(in.sizes().begin(), in.sizes().end());
  sizes[last] = count;
  const executorch::aten::ArrayRef<executorch::aten::SizesType> shape(sizes.data(), sizes.size());
  if (executorch::runtime::resize_tensor(values, shape) != Error::Ok ||
      executorch::runtime::resize_tensor(indices, shape) != Error::Ok) {
    return context.fail(Error::InvalidArgument);
  }
  std::memcpy(values.mutable_data_ptr(), found.data(), count * sizeof(float));
  std::memcpy(indices.mutable_data_ptr(), places.data(), count * sizeof(int64_t));
}

// mixed_linear(input, weight, weight_scales, weight_zero_points, dtype=None, *, out), of one vector of floats.
void mixed_linear(KernelRuntimeContext& context, Span<EValue*> stack) {
  const Tensor in = stack[0]->toTensor(), weight = stack[1]->toTensor(), scales = stack[2]->toTensor();
  Tensor out = stack[5]->toTensor();
  const bool ours = plain(in, 2, ScalarType::Float) && plain(weight, 2, ScalarType::Char) &&
      plain(scales, 2, ScalarType::Float) && plain(out, 2, ScalarType::Float) && !stack[3]->toOptional<Tensor>() &&
      in.size(0) == 1 && weight.size(1) == in.size(1) && scales.size(0) == weight.size(0) && scales.size(1) > 0 &&
      weight.size(1) % (scales.size(1) * ring::kWidth) == 0;
  if (!ours) return pass_on(rows, context, stack);
  const executorch::aten::SizesType sizes[] = {1, static_cast<executorch::aten::SizesType>(weight.size(0))};
  if (executorch::runtime::resize_tensor(out, {sizes, 2}) != Error::Ok) return context.fail(Error::InvalidArgument);
  ring::rows_times(
      data<int8_t>(weight), data<float>(scales), data<float>(in), out.mutable_data_ptr<float>(), weight.size(0),
      weight.size(1), scales.size(1), run_parallel);
}

Kernel* entry(const char* name) {
  const auto kernels = executorch::runtime::get_registered_kernels();
  for (const Kernel& kernel : kernels) {
    if (std::strcmp(kernel.name_, name) == 0) return const_cast<Kernel*>(&kernel);
  }
  return nullptr;
}

bool use_kernel(Replacement& kernel, bool use) {
  Kernel* found = entry(kernel.name);
  if (!found) {
    return use && executorch::runtime::register_kernel(Kernel(kernel.name, kernel.own)) == Error::Ok;
  }
  if (found->op_ != kernel.own) kernel.replaced = found->op_;
  if (use) found->op_ = kernel.own;
  else if (kernel.replaced) found->op_ = kernel.replaced;
  return found->op_ == kernel.own;
}

}  // namespace

int ring_use_kernels(int use) {
  bool all = true;
  for (Replacement* kernel : {&attention, &quantized_attention, &conversion, &largest, &rows}) all = use_kernel(*kernel, use) && all;
  return all;
}
