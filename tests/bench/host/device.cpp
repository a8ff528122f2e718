// Adds the device "cuda" to a torch that was built without CUDA, on a machine without a GPU.
//
// Tensors on this device are in CPU memory and report the device cuda:0. Operators go through
// torch's dispatcher, autograd and autocast. This file implements allocations, views and matrix
// products; a product only allocates its result. Every other operator runs on the CPU on the same
// memory. The library records the calls that would make the CPU wait for a GPU.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
const c10::Device kDevice(c10::kCUDA, 0);
const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

// The device and its only stream

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void*) const override { return false; }
};
// The allocator caches freed blocks by size, as torch's allocator for CUDA does.
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, kDevice};
    const size_t size = (bytes + 511) / 512 * 512;
    void* block = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex());
      auto& blocks = kept()[size];
      if (!blocks.empty()) {
        block = blocks.back();
        blocks.pop_back();
      }
    }
    if (block == nullptr) {
      block = std::aligned_alloc(512, size + 512);
      std::memcpy(block, &size, sizeof size);
      // New memory is filled with zeros, so that a program does not read a random NaN.
      std::memset(static_cast<char*>(block) + 512, 0, size);
    }
    return {static_cast<char*>(block) + 512, block, &release, kDevice};
  }
  static void release(void* block) {
    if (block == nullptr) return;
    size_t size;
    std::memcpy(&size, block, sizeof size);
    std::lock_guard<std::mutex> lock(mutex());
    kept()[size].push_back(block);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  static std::mutex& mutex() {
    static auto* lock = new std::mutex;
    return *lock;
  }
  static std::unordered_map<size_t, std::vector<void*>>& kept() {
    static auto* blocks = new std::unordered_map<size_t, std::vector<void*>>;
    return *blocks;
  }
};
Allocator allocator;

// Recording of synchronizations, by the name of the operator

std::vector<std::string> waits;

void note_wait(const std::string& name) {
  std::lock_guard<std::mutex> lock(Allocator::mutex());
  waits.push_back(name);
}

// The result of these operators, or its size, depends on values that the CPU must read from the
// GPU.
const std::set<std::string> kWaiting = {
    "aten::_unique2", "aten::equal",      "aten::masked_select",
    "aten::nonzero",  "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::is_nonzero", "aten::repeat_interleave",
    "aten::histc",
};

// Native operators

Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &allocator, kKeys,
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes),
                                           C10_AS_INTARRAYREF_SLOW(strides), &allocator, kKeys,
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& x, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                  std::optional<c10::SymInt> offset) {
  std::optional<int64_t> plain;
  if (offset) plain = offset->expect_int();
  return at::native::as_strided_tensorimpl(x, C10_AS_INTARRAYREF_SLOW(sizes),
                                           C10_AS_INTARRAYREF_SLOW(strides), plain);
}

Tensor view(const Tensor& x, c10::SymIntArrayRef sizes) {
  return at::native::view(x, C10_AS_INTARRAYREF_SLOW(sizes));
}

Tensor reshape_alias(const Tensor& x, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(x, C10_AS_INTARRAYREF_SLOW(sizes),
                                    C10_AS_INTARRAYREF_SLOW(strides));
}

Tensor product(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0), "mm: shapes do not fit");
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "mm: dtypes differ");
  return at::detail::empty_generic({a.size(0), b.size(1)}, &allocator, kKeys, a.scalar_type(),
                                   std::nullopt);
}

Tensor sum_and_product(const Tensor&, const Tensor& a, const Tensor& b, const at::Scalar&,
                       const at::Scalar&) {
  return product(a, b);
}

at::Scalar read_number(const Tensor& x) {
  note_wait("aten::_local_scalar_dense");
  return at::_local_scalar_dense(at::from_blob(x.data_ptr(), {}, x.options().device(c10::kCPU)));
}

// Execution of every other operator

constexpr int64_t kLarge = 1 << 14;

// Returns a CPU tensor that shares the memory of x.
Tensor cpu_alias(const Tensor& x) {
  return at::from_blob(
      x.data_ptr(), x.sizes(), x.strides(), [x](void*) {},
      x.options().device(c10::kCPU).requires_grad(false));
}

Tensor on_device(const Tensor& x) {
  Tensor result =
      at::detail::empty_strided_generic(x.sizes(), x.strides(), &allocator, kKeys, x.scalar_type());
  if (x.numel() > 0) cpu_alias(result).copy_(x);
  return result;
}

Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  // A copy between devices waits unless it is a non-blocking copy from the CPU.
  const bool between = to.is_cuda() != from.is_cuda();
  if (between && !(non_blocking && from.is_cpu())) {
    note_wait(to.is_cuda() ? "copy to the device" : "copy to the CPU");
  }
  // A GPU copies asynchronously. A large copy is therefore skipped, so that it takes no CPU time.
  if (!between && to.numel() > kLarge) return to;
  Tensor target = to.is_cuda() ? cpu_alias(to) : to;
  target.copy_(from.is_cuda() ? cpu_alias(from) : from);
  return to;
}

void on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  if (kWaiting.count(schema.name()) != 0) note_wait(schema.name());
  const size_t count = schema.arguments().size();
  std::vector<c10::IValue> given(stack->end() - count, stack->end());
  // A GPU computes asynchronously. A large result is therefore not computed, to take no CPU time.
  if (schema.returns().size() == 1 && count > 0 && schema.arguments()[count - 1].is_out() &&
      given.back().toTensor().numel() > kLarge) {
    torch::jit::drop(*stack, count);
    stack->push_back(given.back());
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = (*stack)[stack->size() - count + i];
    const auto& argument = schema.arguments()[i];
    if (argument.is_out() && given[i].toTensor().numel() == 0) {
      // The operator resizes an output that is empty.
      value = at::empty({0}, given[i].toTensor().options().device(c10::kCPU));
    } else if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) {
      value = cpu_alias(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& x : value.toTensorVector()) {
        tensors.push_back(x.is_cuda() ? cpu_alias(x) : x);
      }
      value = c10::List<Tensor>(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const std::optional<Tensor>& x : value.toOptionalTensorVector()) {
        const bool moved = x && x->defined() && x->is_cuda();
        if (moved && x->scalar_type() == at::kBool) note_wait(schema.name() + " with a bool index");
        tensors.push_back(moved ? std::optional<Tensor>(cpu_alias(*x)) : x);
      }
      value = tensors;
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      value = c10::IValue();
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  // If a result aliases an argument, as in an in-place operation, return the original tensor.
  const size_t results = schema.returns().size();
  for (size_t i = 0; i < results; ++i) {
    c10::IValue& value = (*stack)[stack->size() - results + i];
    const auto* info = schema.returns()[i].alias_info();
    bool found = false;
    for (size_t j = 0; info != nullptr && j < count; ++j) {
      const auto* own = schema.arguments()[j].alias_info();
      if (own != nullptr && *own == *info) {
        if (schema.arguments()[j].is_out() && given[j].toTensor().numel() == 0) {
          const Tensor result = on_device(value.toTensor());
          auto* impl = given[j].toTensor().unsafeGetTensorImpl();
          impl->set_storage_keep_dtype(result.storage());
          impl->set_sizes_and_strides(result.sizes(), result.strides());
        }
        value = given[j];
        found = true;
        break;
      }
    }
    if (found) continue;
    if (value.isTensor() && value.toTensor().defined()) {
      value = on_device(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& x : value.toTensorVector()) tensors.push_back(on_device(x));
      value = c10::List<Tensor>(tensors);
    }
  }
}

std::vector<std::string> take_waits() {
  std::lock_guard<std::mutex> lock(Allocator::mutex());
  std::vector<std::string> taken;
  taken.swap(waits);
  return taken;
}

}  // namespace

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

// A torch without CUDA reports no accelerator. This definition replaces torch's definition, because
// this library is loaded before torch.
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::kCUDA; }
}  // namespace at::accelerator

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("mm", product);
  m.impl("addmm", sum_and_product);
  m.impl("_local_scalar_dense", read_number);
  m.impl("copy_", copy);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY(mocked_cuda, m) { m.def("take_waits() -> str[]", take_waits); }
