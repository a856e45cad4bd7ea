// Lets torch's autograd take fake tensors of a GPU where there is none: see fake_cuda.py.
//
// torch's FakeTensorMode replaces the guard of CUDA devices where no device is found, but the
// backward pass then asks the hooks of CUDA whether the device has a context, which raises.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kCuda> {
  Device getDevice() const override { return Device(kCuda, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  // Which convolutions are cuDNN's, and with which layout, depends on these.
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const override { return 91900; }
};

Guard guard;
Hooks hooks;

}  // namespace

extern "C" void pretend() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kCuda)].store(&guard);
  // The hooks are made when torch is loaded and are never replaced, so theirs answer as ours do:
  // objects without fields, of which only the table of methods differs.
  auto& present = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(&present) = *reinterpret_cast<void**>(&hooks);
}
