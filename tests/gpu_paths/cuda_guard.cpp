// Lets torch's CPU build hold tensors of CUDA devices: autograd asks for a device guard and for an accelerator.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <cstring>
#include <new>

namespace {
struct Hooks : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return c10::impl::kFakeGuardImplMaxDevices; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
c10::impl::FakeGuardImpl<c10::DeviceType::CUDA> guard;
alignas(Hooks) unsigned char before[sizeof(at::CUDAHooksInterface)];
static_assert(sizeof(Hooks) == sizeof(before));
void* hooks() { return const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()); }
auto& registered() { return c10::impl::device_guard_impl_registry[1]; }
static_assert(static_cast<int>(c10::DeviceType::CUDA) == 1);
} // namespace

extern "C" void install() {
  registered().store(&guard);
  std::memcpy(before, hooks(), sizeof(before));
  new (hooks()) Hooks();
}

extern "C" void uninstall() {
  std::memcpy(hooks(), before, sizeof(before));
  registered().store(nullptr);
}
