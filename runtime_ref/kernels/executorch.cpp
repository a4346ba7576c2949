// The kernels of this folder under the names that exported programs call.
//
// A registry holds one kernel of a name, and ExecuTorch's own may be in it already, so that its entry is taken over in
// place. What these kernels do not handle goes to those that they replaced.
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "half.h"
#include "ring_kernels.h"

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
void to_dim_order_copy(KernelRuntimeContext& context, Span<EValue*> stack);

Replacement attention{"llama::custom_sdpa.out", custom_sdpa, nullptr};
Replacement conversion{"dim_order_ops::_to_dim_order_copy.out", to_dim_order_copy, nullptr};

// What a kernel does not take is for the one that it replaced.
void pass_on(const Replacement& to, KernelRuntimeContext& context, Span<EValue*> stack) {
  if (to.replaced) return to.replaced(context, stack);
  context.fail(Error::InvalidArgument);
}

// ExecuTorch's pool gives every thread an equal stretch; tasks differ, so a thread takes the next one when it is done.
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

template <typename E>
void attend(ring::Attention<E> a, const Tensor& query, const Tensor& keys, const Tensor& values, Tensor& out) {
  a.query = static_cast<const E*>(query.const_data_ptr());
  a.keys = static_cast<const E*>(keys.const_data_ptr());
  a.values = static_cast<const E*>(values.const_data_ptr());
  a.out = static_cast<E*>(out.mutable_data_ptr());
  ring::attend(a, run_parallel);
}

// custom_sdpa(query, key, value, start_pos, attn_mask=None, dropout_p=0, is_causal=False, scale=None, *, out)
void custom_sdpa(KernelRuntimeContext& context, Span<EValue*> stack) {
  const Tensor query = stack[0]->toTensor(), keys = stack[1]->toTensor(), values = stack[2]->toTensor();
  const int64_t start = stack[3]->toInt();
  const auto mask = stack[4]->toOptional<Tensor>();
  const double dropout = stack[5]->toDouble();
  const bool causal = stack[6]->toBool();
  const auto scale = stack[7]->toOptional<double>();
  Tensor out = stack[8]->toTensor();

  const int64_t query_len = query.dim() == 4 ? query.size(1) : 0;
  const ScalarType type = query.scalar_type();
  const bool ours = (type == ScalarType::Float || type == ScalarType::Half) && plain(query, 4, type) &&
      plain(keys, 4, type) && plain(values, 4, type) && plain(out, 4, type) && query.size(0) == 1 &&
      keys.size(0) == 1 && values.size(0) == 1 && keys.size(2) == values.size(2) && keys.size(1) == values.size(1) &&
      keys.size(3) == query.size(3) && values.size(3) == query.size(3) && query.size(2) % keys.size(2) == 0 &&
      query_len > 0 && dropout == 0.0 &&
      (mask ? !causal && plain(*mask, 2, ScalarType::Float) && mask->size(0) == query_len &&
                  mask->size(1) == keys.size(1)
            : start >= 0 && start + query_len <= keys.size(1));
  if (!ours) return pass_on(attention, context, stack);
  if (executorch::runtime::resize_tensor(out, query.sizes()) != Error::Ok) return context.fail(Error::InvalidArgument);
  const auto fill = [&](auto a) {
    a.query_len = query_len;
    a.rows = keys.size(1);
    a.num_heads = query.size(2);
    a.num_kv_heads = keys.size(2);
    a.head_dim = query.size(3);
    a.mask = mask ? mask->const_data_ptr<float>() : nullptr;
    a.start = start;
    a.causal = causal;
    a.scale = scale ? static_cast<float>(*scale) : 1.0f / std::sqrt(static_cast<float>(a.head_dim));
    attend(a, query, keys, values, out);
  };
  if (type == ScalarType::Float) fill(ring::Attention<float>{});
  else fill(ring::Attention<ring::Half>{});
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

// _to_dim_order_copy(self, non_blocking=False, dim_order=None, *, out): between float32 and float16 in place of
// ExecuTorch's portable kernel, which converts number by number without the processor's help.
void to_dim_order_copy(KernelRuntimeContext& context, Span<EValue*> stack) {
  const Tensor in = stack[0]->toTensor();
  Tensor out = stack[3]->toTensor();
  const ScalarType from = in.scalar_type(), to = out.scalar_type();
  const bool widens = from == ScalarType::Half && to == ScalarType::Float;
  const bool narrows = from == ScalarType::Float && to == ScalarType::Half;
  if (!(widens || narrows) || in.dim() != out.dim() || !contiguous(in) || !contiguous(out)) {
    return pass_on(conversion, context, stack);
  }
  if (executorch::runtime::resize_tensor(out, in.sizes()) != Error::Ok) return context.fail(Error::InvalidArgument);
  if (widens) convert<ring::Half, float>(in, out);
  else convert<float, ring::Half>(in, out);
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
  for (Replacement* kernel : {&attention, &conversion}) all = use_kernel(*kernel, use) && all;
  return all;
}
