// The absent device's random numbers: a generator has CUDA's state, of a seed and an offset, and no numbers come
// of it. Programs save it, set it, compare it and keep several of them (checkpointing, tensor parallelism).
//
// Kernels do not move the offset on: how far they would depends on their launch, which nobody sees here.
#include "record.h"

#include <ATen/Functions.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <map>
#include <memory>
#include <utility>

namespace wt {

struct GeneratorState {
  uint64_t seed = c10::default_rng_seed_val;
  uint64_t offset = 0;
};
static_assert(sizeof(GeneratorState) == 16);  // of ATen's CUDAGeneratorImpl::get_state

struct AbsentGenerator final : c10::GeneratorImpl {
  std::shared_ptr<GeneratorState> state;

  AbsentGenerator(c10::DeviceIndex index, std::shared_ptr<GeneratorState> given)
      : GeneratorImpl(c10::Device(c10::DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)), state(std::move(given)) {}

  void set_current_seed(uint64_t seed) override { *state = {seed, 0}; }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
    state->offset = offset;
  }
  uint64_t get_offset() const override { return state->offset; }
  uint64_t current_seed() const override { return state->seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state->seed;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::detail::empty_cpu({sizeof(GeneratorState)}, at::kByte);
    std::memcpy(bytes.data_ptr(), state.get(), sizeof(GeneratorState));
    return bytes.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& given) override {
    at::detail::check_rng_state(given);
    const auto size = given.numel();
    const bool with_offset = size == sizeof(GeneratorState);
    TORCH_CHECK(with_offset || size == sizeof(uint64_t), "RNG state is wrong size");
    GeneratorState next{0, 0};
    std::memcpy(&next, given.data(), size);
    *state = next;
  }
  // The two that a graph needs: a generator that shares this one's state, and one that takes over another's.
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<AbsentGenerator>(device().index(), state);
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& given) override {
    auto other = c10::dynamic_intrusive_pointer_cast<AbsentGenerator>(given);
    TORCH_CHECK(other, "Provided state is not a CUDA generator state");
    state = other->state;
  }

 private:
  AbsentGenerator* clone_impl() const override {
    return new AbsentGenerator(device().index(), std::make_shared<GeneratorState>(*state));
  }
};

static at::Generator make_generator(c10::DeviceIndex index) {
  return at::make_generator<AbsentGenerator>(index < 0 ? current_device() : index, std::make_shared<GeneratorState>());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = new std::map<c10::DeviceIndex, at::Generator>();
  if (index < 0) index = current_device();
  auto found = all->find(index);
  return found != all->end() ? found->second : all->emplace(index, make_generator(index)).first->second;
}

static bool g_default_is_next = false;

at::Generator new_generator(c10::DeviceIndex index) {
  return std::exchange(g_default_is_next, false) ? default_generator(index) : make_generator(index);
}

}  // namespace wt

extern "C" {
// The next generator that is asked for is its device's own one: Python has no other way to get hold of that.
void wt_default_generator_next() { wt::g_default_is_next = true; }
}
