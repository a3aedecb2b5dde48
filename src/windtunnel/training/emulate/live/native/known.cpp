// Small tensors that came from the host keep their values on the device; what is computed from such tensors alone is
// computed on the host, when the host asks for it. So counts, offsets and masks come back true, and with them the sizes that
// depend on them. Where true or false follows from what is known alone (true or unknown is true), it is known too, element
// by element (Kleene 1938, "On notation for ordinal numbers").
//
// Nothing is done until a value is asked for: a call is remembered with what was known of its arguments. What a router
// chooses (topk, argmax, sort of values that are not there) is declared: the choices go round, so that each is made as
// often as any other.
#include "known.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "record.h"

namespace wt {
namespace {

using Stack = torch::jit::Stack;
using c10::IValue;

constexpr int64_t WHOLE_BYTES = 128 << 20;  // tensors of whole numbers are followed up to here
constexpr int64_t COPIED_BYTES = 16 << 20;  // and copied from the host
constexpr int64_t HOST_ELEMENTS = 8192;     // host tensors among a device operator's arguments
constexpr int DEEP = 400;                   // calls that wait for each other

bool starts(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

// Without autograd and without Python: as inside a kernel.
struct Plain {
  c10::impl::ExcludeDispatchKeyGuard autograd{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::impl::ExcludeDispatchKeyGuard python{c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

at::Tensor at_place(const at::Tensor& flat, const Place& place) {
  auto typed = flat.scalar_type() == place.dtype ? flat : flat.view(at::kByte).view(place.dtype);
  return typed.as_strided(place.sizes, place.strides, place.offset);
}

int64_t item_bytes(c10::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

// The bytes of the items at a place, as a last dimension.
at::Tensor bytes_at(const at::Tensor& flat, const Place& place) {
  const int64_t item = item_bytes(place.dtype);
  auto sizes = place.sizes, strides = place.strides;
  for (auto& stride : strides) stride *= item;
  sizes.push_back(item);
  strides.push_back(1);
  return flat.as_strided(sizes, strides, place.offset * item);
}

// Whether a tensor is worth being followed.
bool is_worth(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return false;
  return static_cast<int64_t>(t.nbytes()) <= (c10::isIntegralType(t.scalar_type(), true) ? WHOLE_BYTES : SHADOW_BYTES);
}

at::Tensor work_out(const KnownPtr& known) {
  if (known->flat.defined() || !known->call) return known->flat;
  Plain plain;
  auto& call = *known->call;
  if (call.run) {
    auto run = std::move(call.run);
    call.run = nullptr;
    try {
      call.results = run();
    } catch (const std::exception&) {  // the host has no kernel for it: it stays unknown
    }
  }
  const auto& place = known->place;
  if (known->result < call.results.size() && call.results[known->result].defined() && known->bytes % item_bytes(place.dtype) == 0) {
    at::Tensor flat;
    if (known->before) {
      auto held = work_out(known->before);
      if (held.defined()) flat = held.clone();
    } else {
      flat = at::empty({known->bytes / item_bytes(place.dtype)}, at::TensorOptions().dtype(place.dtype));
    }
    if (flat.defined()) {
      at_place(flat, place).copy_(call.results[known->result]);
      known->flat = flat;
      const bool partly = call.sure.defined() && !call.sure.all().item<bool>();
      if (known->before && known->before->sure.defined()) known->sure = known->before->sure.clone();
      else if (partly) known->sure = at::ones({known->bytes}, at::kBool);
      if (known->sure.defined()) {
        auto there = bytes_at(known->sure, place);
        if (partly) there.copy_(call.sure.unsqueeze(-1));
        else there.fill_(true);
      }
    }
  }
  known->call.reset();
  known->before.reset();
  return known->flat;
}

// The values at a place, where they are known, and where they are.
std::pair<at::Tensor, at::Tensor> values_and_sure(const KnownPtr& known, const Place& place) {
  auto flat = known ? work_out(known) : at::Tensor();
  if (!flat.defined() || known->bytes % item_bytes(place.dtype) != 0)
    return {at::zeros(place.sizes, place.dtype), at::zeros(place.sizes, at::kBool)};
  auto held = at_place(flat, place);
  return {held, known->sure.defined() ? bytes_at(known->sure, place).select(-1, 0) : at::ones(place.sizes, at::kBool)};
}

// An argument of a call that waits: a plain value, a host tensor, what is known of a device tensor, or room for a result.
struct Argument {
  enum What { VALUE, KNOWN, UNKNOWN, ROOM, LIST, OPTIONAL_LIST } what = VALUE;
  IValue value;
  KnownPtr known;
  Place place;
  std::vector<Argument> items;

  at::Tensor tensor() const {
    if (what == VALUE) return value.isTensor() ? value.toTensor() : at::Tensor();
    if (what == ROOM) return at::empty_strided(place.sizes, place.strides, at::TensorOptions().dtype(place.dtype));
    auto t = values(known, place);
    TORCH_CHECK(t.defined(), "unknown");
    return t;
  }
  IValue given(bool written) const {
    if (what == VALUE) return value;
    if (what == LIST) {
      c10::List<at::Tensor> list;
      for (const auto& item : items) list.push_back(item.tensor());
      return list;
    }
    if (what == OPTIONAL_LIST) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& item : items) {
        auto t = item.tensor();
        list.push_back(t.defined() ? std::optional<at::Tensor>(t) : std::nullopt);
      }
      return list;
    }
    return written && what == KNOWN ? tensor().clone() : tensor();
  }
};

// False where it is not known.
bool take_tensor(const at::Tensor& t, bool unread, Argument& into, Follow& follow) {
  if (!t.defined()) {
    into.value = IValue(t);
    return true;
  }
  into.place = Place(t);
  if (t.is_cuda() && t.numel() == 0 && !unread) {  // there is nothing to know
    into.value = IValue(at::empty(t.sizes(), at::TensorOptions().dtype(t.scalar_type())));
    return true;
  }
  if (!t.is_cuda()) {
    if (t.is_meta() || t.numel() > HOST_ELEMENTS) return false;
    auto copy = t.detach().clone();
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    into.value = IValue(copy);
    return true;
  }
  if (unread) {
    into.what = Argument::ROOM;
    return true;
  }
  into.known = known_of(t);
  if (!into.known || t.is_conj() || t.is_neg()) return false;
  into.what = Argument::KNOWN;
  follow.declared |= into.known->declared;
  follow.depth = std::max(follow.depth, into.known->depth + 1);
  return true;
}

// Row r takes r*k, r*k+1, … modulo the number of choices; where there are more choices than are taken, spread over them.
at::Tensor in_turn(const std::vector<int64_t>& sizes, int64_t dim, int64_t each, int64_t step, int64_t choices) {
  auto shape = sizes;
  if (dim >= 0) {
    shape.erase(shape.begin() + dim);
    shape.push_back(each);
  }
  int64_t rows = 1;
  for (auto size : sizes) rows *= size;
  rows /= std::max<int64_t>(each, 1);
  auto first = at::arange(rows, at::kLong).mul_(step).unsqueeze(1);
  const int64_t apart = std::max<int64_t>(choices / std::max<int64_t>(rows * each, 1), 1);
  auto picked = (first + at::arange(each, at::kLong)).mul_(apart).add_(apart / 2).remainder(choices).reshape(shape);
  return dim >= 0 ? picked.movedim(-1, dim) : picked;
}

}  // namespace

at::Tensor values(const KnownPtr& known, const Place& place) {
  auto flat = work_out(known);
  if (!flat.defined() || known->bytes % item_bytes(place.dtype) != 0) return {};
  if (known->sure.defined() && !bytes_at(known->sure, place).all().item<bool>()) return {};
  return at_place(flat, place);
}

at::Tensor host_values(const at::Tensor& t) {
  auto known = known_of(t);
  if (!known) return {};
  auto found = values(known, Place(t));
  auto& r = recorder();
  if (found.defined() && known->declared) r.read("routing");
  return found;
}

bool is_known(const at::Tensor& t) {
  auto known = known_of(t);
  return known && values(known, Place(t)).defined();
}

void set_values(const at::Tensor& t, const at::Tensor& host, bool declared) {
  const bool whole = c10::isIntegralType(t.scalar_type(), true) && c10::isIntegralType(host.scalar_type(), true);
  if (static_cast<int64_t>(t.nbytes()) > (whole ? COPIED_BYTES : SHADOW_BYTES)) return drop_shadow(t);
  auto call = std::make_shared<Call>();
  call->results = {host.detach().clone()};
  set_result(t, std::move(call), 0, declared, 0, known_of(t));
}

void set_promise(const at::Tensor& t, int64_t promise) {
  if (!promise || !is_small(t)) return drop_shadow(t);
  auto call = std::make_shared<Call>();
  call->run = [promise, sizes = t.sizes().vec(), dtype = t.scalar_type()]() {
    auto said = at::empty(sizes, at::TensorOptions().dtype(dtype));
    const int kept = recorder().keep(promise, said.data_ptr(), static_cast<int64_t>(said.nbytes()));
    return std::vector<at::Tensor>{kept ? said : at::Tensor()};
  };
  set_result(t, std::move(call), 0, false, 0, known_of(t));
}

void copy_values(const at::Tensor& t, const at::Tensor& source) {
  auto from = known_of(source);
  if (!from || !is_worth(t)) return drop_shadow(t);
  auto call = std::make_shared<Call>();
  call->run = [from, place = Place(source), sizes = t.sizes().vec(), dtype = t.scalar_type(), self = call.get()]() {
    auto [held, sure] = values_and_sure(from, place);
    self->sure = sure.expand(sizes);
    return std::vector<at::Tensor>{held.expand(sizes).to(dtype)};
  };
  set_result(t, std::move(call), 0, from->declared, from->depth + 1, known_of(t));
}

void Follower::prepare(const c10::OperatorHandle& op, const std::string& name, const std::vector<int>& written, bool views) {
  written_ = written;
  const auto base = name.substr(name.find('.') + 1);
  for (const auto& argument : op.schema().arguments()) unread_.push_back(false);
  for (int i : written) unread_[i] = op.schema().arguments()[i].kwarg_only();
  if (starts(base, "fill_.") || starts(base, "zero_.")) unread_[0] = true;
  factory_ = starts(base, "tril_indices") || starts(base, "triu_indices");
  histogram_ = starts(base, "histc.default");
  if (starts(base, "topk.default")) pick_ = TOPK;
  if (starts(base, "sort.")) pick_ = SORT;
  if (starts(base, "argmax.default") || starts(base, "argmin.default") || base == "max.dim" || base == "min.dim") pick_ = REDUCE;
  if (starts(base, "multinomial.default")) pick_ = DRAW;
  for (const char* either : {"bitwise_or", "logical_or"})
    if (starts(base, either)) logic_ = OR;
  for (const char* both : {"bitwise_and", "logical_and", "mul.", "mul_."})
    if (starts(base, both)) logic_ = AND;
  if (starts(base, "bitwise_not") || starts(base, "logical_not")) logic_ = SAME;
  if (starts(base, "any.")) logic_ = ANY;
  if (starts(base, "all.")) logic_ = ALL;
  for (const char* sized : {"nonzero.default", "masked_select.default", "_unique2.default", "unique_dim.default",
                            "unique_consecutive.default", "repeat_interleave.Tensor", "bincount.default"})
    sized_by_values |= base == sized;
  follows_ = !views && !op.hasTag(at::Tag::nondeterministic_seeded);
  for (const char* random : {"rand", "normal", "log_normal", "bernoulli", "multinomial", "uniform", "exponential", "geometric",
                             "cauchy", "poisson", "empty", "new_empty", "resize", "set_", "_foreach", "_fused", "_amp", "record_stream"})
    if (starts(base, random)) follows_ = false;
}

Follow Follower::take(const c10::OperatorHandle& op, const Stack& args) const {
  Follow follow;
  if (!follows_) return choose(args);
  if (logic_ != PLAIN) return reason(op, args);
  std::vector<Argument> taken(args.size());
  bool tensors = factory_;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto& v = args[i];
    auto& into = taken[i];
    if (v.isTensor()) {
      if (!take_tensor(v.toTensor(), unread_[i], into, follow)) return choose(args);
      tensors |= v.toTensor().defined();
    } else if (v.isTensorList()) {
      into.what = Argument::LIST;
      for (const auto& t : v.toTensorVector()) {
        into.items.emplace_back();
        if (!take_tensor(t, false, into.items.back(), follow)) return {};
      }
      tensors = true;
    } else if (v.isOptionalTensorList()) {
      into.what = Argument::OPTIONAL_LIST;
      for (const auto& t : v.toOptionalTensorVector()) {
        into.items.emplace_back();
        if (!take_tensor(t.value_or(at::Tensor()), false, into.items.back(), follow)) return {};
      }
    } else if (v.isGenerator()) {
      return {};
    } else {
      into.value = v.isDevice() ? IValue(c10::Device(c10::DeviceType::CPU)) : v;
    }
  }
  if (!tensors) return follow;
  for (int i : written_) follow.before.push_back(args[i].isTensor() ? known_of(args[i].toTensor()) : nullptr);
  follow.call = std::make_shared<Call>();
  auto written = written_;
  const bool histogram = histogram_;
  follow.call->run = [op, taken = std::move(taken), written = std::move(written), histogram]() {
    Stack stack;
    std::vector<at::Tensor> results;
    for (size_t i = 0; i < taken.size(); ++i)
      stack.push_back(taken[i].given(std::find(written.begin(), written.end(), static_cast<int>(i)) != written.end()));
    for (int i : written) results.push_back(stack[i].isTensor() ? stack[i].toTensor() : at::Tensor());
    const auto dtype = histogram ? stack[0].toTensor().scalar_type() : at::kFloat;
    if (histogram) stack[0] = stack[0].toTensor().to(at::kDouble);  // the device counts whole numbers, the host does not
    op.callBoxed(&stack);
    for (const auto& v : stack) {
      if (v.isTensor()) results.push_back(histogram ? v.toTensor().to(dtype) : v.toTensor());
      else if (v.isTensorList())
        for (const auto& t : v.toTensorVector()) results.push_back(t);
    }
    return results;
  };
  return follow;
}

// An operator on truth values and whole numbers, whose result may be known where its arguments are not.
Follow Follower::reason(const c10::OperatorHandle& op, const Stack& args) const {
  Follow follow;
  std::vector<Argument> taken(args.size());
  int known = 0, unknown = 0;
  bool whole = true;
  for (size_t i = 0; i < args.size(); ++i) {
    auto& into = taken[i];
    if (!args[i].isTensor()) {
      into.value = args[i];
      continue;
    }
    const bool is_known = take_tensor(args[i].toTensor(), unread_[i], into, follow);
    if (into.what == Argument::ROOM) continue;
    whole &= c10::isIntegralType(args[i].toTensor().scalar_type(), true);
    ++(is_known ? known : unknown);
    if (!is_known) into.what = Argument::UNKNOWN;
  }
  if (!known || (unknown && !whole)) return {};
  for (int i : written_) follow.before.push_back(known_of(args[i].toTensor()));
  follow.call = std::make_shared<Call>();
  const bool bits = starts(op.schema().name(), "aten::bitwise");
  follow.call->run = [op, taken = std::move(taken), logic = logic_, bits, self = follow.call.get()]() {
    auto decides = [&](const at::Tensor& v) {
      if (logic == AND) return v == 0;
      return bits && v.scalar_type() != at::kBool ? v == -1 : v != 0;
    };
    Stack stack;
    auto sure = at::ones({}, at::kBool), decided = at::zeros({}, at::kBool);
    for (const auto& argument : taken) {
      stack.push_back(argument.value);
      if (argument.what == Argument::ROOM) {
        stack.back() = at::empty({0}, argument.place.dtype);
      } else if (argument.what != Argument::VALUE) {
        auto [v, s] = values_and_sure(argument.known, argument.place);
        TORCH_CHECK(c10::isIntegralType(v.scalar_type(), true) || s.all().item<bool>(), "unknown");
        stack.back() = v.masked_fill(s.logical_not(), logic == ALL ? 1 : 0);
        decided = decided | (s & decides(v));
        sure = sure & s;
      } else if (argument.value.isTensor()) {
        decided = decided | decides(argument.value.toTensor());
      }
    }
    Stack masks = stack;
    op.callBoxed(&stack);
    auto result = stack[0].toTensor();
    if (logic == OR || logic == AND) sure = sure | decided;
    if (logic == ANY || logic == ALL) {  // a true one decides; else all must be sure
      masks[0] = logic == ANY ? sure.logical_not() : sure;
      op.callBoxed(&masks);
      const auto of_masks = masks[0].toTensor().to(at::kBool), said = result.to(at::kBool);
      sure = logic == ANY ? said | of_masks.logical_not() : said.logical_not() | of_masks;
    }
    self->sure = sure;
    return std::vector<at::Tensor>{result};
  };
  return follow;
}

Follow Follower::choose(const Stack& args) const {
  Follow follow;
  if (pick_ == NONE || !args[0].isTensor() || args[0].toTensor().dim() == 0) return follow;
  const auto sizes = args[0].toTensor().sizes().vec();
  const int64_t rank = static_cast<int64_t>(sizes.size());
  auto wrapped = [&](const IValue& v) { return v.isInt() ? (v.toInt() + rank) % rank : int64_t(-1); };
  int64_t dim = -1, each = 1, step = 1;
  bool keep = true;
  if (pick_ == TOPK || pick_ == DRAW) {
    each = step = args[1].toInt();
    dim = pick_ == TOPK ? wrapped(args[2]) : rank - 1;
  } else if (pick_ == SORT) {
    for (size_t i = 1; i < args.size(); ++i)
      if (args[i].isInt()) dim = wrapped(args[i]);
    if (dim < 0) return follow;
    each = sizes[dim];
  } else {
    dim = wrapped(args[1]);
    keep = args[2].toBool();
  }
  int64_t choices = 1;
  if (dim >= 0) choices = sizes[dim];
  else for (auto size : sizes) choices *= size;
  if (choices <= 0) return follow;
  auto out = sizes;
  if (dim >= 0) out[dim] = each;
  else out.assign(keep ? rank : 0, 1);
  const bool squeezed = dim >= 0 && pick_ == REDUCE && !keep;
  follow.declared = follow.chosen = true;
  follow.call = std::make_shared<Call>();
  follow.call->run = [out, dim, each, step, choices, squeezed]() {
    auto picked = in_turn(out, dim, each, step, choices);
    if (squeezed) picked = picked.squeeze(dim);
    return std::vector<at::Tensor>{picked};
  };
  return follow;
}

void Follower::give(const Follow& follow, const Stack& args, const std::vector<at::Tensor>& returned) const {
  if (follow.chosen) {
    if (!returned.empty() && is_worth(returned.back())) set_result(returned.back(), follow.call, 0, true, 0, nullptr);
    return;
  }
  for (size_t i = 0; i < written_.size(); ++i)
    if (args[written_[i]].isTensor() && is_worth(args[written_[i]].toTensor()))
      set_result(args[written_[i]].toTensor(), follow.call, i, follow.declared, follow.depth, follow.before[i]);
  for (size_t i = 0; i < returned.size(); ++i)
    if (is_worth(returned[i])) set_result(returned[i], follow.call, written_.size() + i, follow.declared, follow.depth, nullptr);
}

void set_result(const at::Tensor& t, std::shared_ptr<Call> call, size_t result, bool declared, int depth, const KnownPtr& before) {
  auto known = std::make_shared<Known>();
  known->call = std::move(call);
  known->result = result;
  known->place = Place(t);
  known->declared = declared || (before && before->declared);
  known->depth = std::max(depth, before ? before->depth + 1 : 0);
  known->bytes = static_cast<int64_t>(t.storage().nbytes());
  const bool fills = t.numel() * static_cast<int64_t>(t.element_size()) == known->bytes && t.is_non_overlapping_and_dense();
  if (!fills) {
    if (!before) return drop_shadow(t);
    known->before = before;
  }
  if (known->depth > DEEP) {
    if (!work_out(known).defined()) return drop_shadow(t);
    known->depth = 0;
  }
  set_known(t, std::move(known));
}

}  // namespace wt
