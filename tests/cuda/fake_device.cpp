// A CUDA device that PyTorch's CPU build can ask for: one, whose streams and events do nothing. Fake tensors alone are
// on it, so that no memory and no kernel is ever asked for. Without a guard the backward pass ends the process.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/SDPBackend.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

struct FakeGuard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getNewStream(Device device, int = 0) const override { return getStream(device); }
  Stream exchangeStream(Stream) const noexcept override { return getStream(getDevice()); }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<FakeGuard*>(this);  // an event that was recorded is not null
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

// PyTorch looks for a class of this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

static c10::impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new FakeGuard());
namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

// Which kernel attends: what PyTorch's sdp_utils.cpp, which only its CUDA build has, asks of ours. cuDNN's, which has no
// deterministic backward pass, is left out there too.
static int64_t choose_attention(const at::Tensor& query, const at::Tensor&, const at::Tensor&,
                                const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool) {
  const auto& chosen = at::globalContext();
  const bool is_half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  if (chosen.userEnabledFlashSDP() && is_half && !mask && query.sym_size(-1) <= 256)
    return static_cast<int64_t>(at::SDPBackend::flash_attention);
  if (chosen.userEnabledMemEfficientSDP()) return static_cast<int64_t>(at::SDPBackend::efficient_attention);
  return static_cast<int64_t>(at::SDPBackend::math);
}
namespace at::native {
static const bool chooses = (_fused_sdp_choice_stub.set_cuda_dispatch_ptr(
    &choose_attention), true);
}  // namespace at::native
