// Every operator that a CUDA build has a CUDA kernel for, answered by its shape function.
//
// One boxed kernel stands in for them all. A call's key is the operator with the shapes, strides, dtypes and plain
// values of its arguments. The first call of a key asks PyTorch's own Meta kernel what comes out; later calls
// take the answer from a table, which is why a capture costs microseconds an operator. Outputs get fresh storage
// from the absent allocator; outputs that the schema says alias an input get that input's storage.
#include "describe.h"
#include "known.h"
#include "record.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace wt {
void register_by_hand(torch::Library& library);
void register_recurrent();

namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

struct Out {
  int alias = -1;  // index of the argument that this output is (in-place) or views
  bool view = false;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool defined = true;
};

struct Return {
  enum What { TENSOR, LIST, PLAIN } what = TENSOR;
  std::vector<Out> outs;
  IValue plain;
};

struct Resize {
  int arg;
  std::vector<int64_t> sizes, strides;
};

struct Entry {
  int32_t row = -1;
  std::vector<Return> returns;
  std::vector<Resize> resizes;
};

struct MetaMaker {
  // Storages that are shared among arguments stay shared among their shape-only copies.
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages;

  at::Tensor operator()(const at::Tensor& t) {
    if (!t.defined() || t.is_meta()) return t;
    if (!t.is_cuda() && t.dim() == 0) return t;
    auto* impl = t.storage().unsafeGetStorageImpl();
    auto found = storages.find(impl);
    if (found == storages.end()) {
      c10::Storage fresh(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                         c10::GetAllocator(c10::DeviceType::Meta), true);
      found = storages.emplace(impl, fresh).first;
    }
    auto m = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second),
                                                      c10::DispatchKeySet(c10::DispatchKey::Meta), t.dtype());
    m.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.is_conj()) m._set_conj(true);
    if (t.is_neg()) m._set_neg(true);
    return m;
  }

  IValue value(const IValue& v) {
    if (v.isTensor()) return IValue((*this)(v.toTensor()));
    if (v.isTensorList()) {
      c10::List<at::Tensor> out;
      for (const auto& t : v.toTensorVector()) out.push_back((*this)(t));
      return out;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> out;
      for (const auto& t : v.toOptionalTensorVector())
        out.push_back(t && t->defined() ? std::optional<at::Tensor>((*this)(*t)) : std::nullopt);
      return out;
    }
    if (v.isDevice()) return IValue(c10::Device(c10::DeviceType::Meta));
    return v;
  }
};

// The device that a call names, else that of its first tensor on a device; -1 where it says nothing.
c10::DeviceIndex device_of(const Stack& args) {
  c10::DeviceIndex first = -1;
  for (const auto& v : args) {
    if (v.isTensor()) {
      const auto& t = v.toTensor();
      if (first < 0 && t.defined() && t.is_cuda()) first = t.device().index();
    } else if (v.isDevice()) {
      if (v.toDevice().is_cuda() && v.toDevice().has_index()) return v.toDevice().index();
    } else if (first < 0 && v.isTensorList()) {
      for (const auto& t : v.toTensorVector())
        if (first < 0 && t.defined() && t.is_cuda()) first = t.device().index();
    }
  }
  return first;
}

struct Kernel final : c10::OperatorKernel {
  std::unordered_map<std::string, Entry> table;
  std::unordered_map<std::string, int32_t> rows;
  bool ready = false, any_alias = false, views = false, in_place_only = true, has_meta = true;
  std::string name;
  std::vector<int> written;                  // arguments that the schema says are written
  std::vector<bool> numbers;   // for each argument: a number that is computed with (a threshold, an offset, a rate)
  bool has_tensors = false, checks_for_inf = false, masks = false;
  Follower follower;
  std::vector<std::pair<int, bool>> aliases; // for each return: argument that it aliases (-1: none), and whether it is a view
  std::vector<std::pair<bool, bool>> inputs_alias;

  void prepare(const c10::OperatorHandle& op) {
    const auto& schema = op.schema();
    name = schema.name();
    auto colons = name.find("::");
    if (colons != std::string::npos) name.replace(colons, 2, ".");
    name += '.';
    name += schema.overload_name().empty() ? "default" : schema.overload_name();
    const auto& args = schema.arguments();
    for (size_t i = 0; i < args.size(); ++i) {
      if (args[i].alias_info() && args[i].alias_info()->isWrite()) written.push_back(static_cast<int>(i));
      auto type = args[i].real_type();
      if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
      numbers.push_back(type->kind() == c10::TypeKind::NumberType);
      const auto kind = type->kind();
      has_tensors |= kind == c10::TypeKind::TensorType ||
                     (kind == c10::TypeKind::ListType && type->containedType(0)->kind() == c10::TypeKind::TensorType);
    }
    checks_for_inf = name == "aten._amp_foreach_non_finite_check_and_unscale_.default";
    for (const auto& ret : schema.returns()) {
      int from = -1;
      bool view = false;
      if (ret.alias_info()) {
        for (size_t i = 0; i < args.size(); ++i) {
          if (!args[i].alias_info()) continue;
          const auto& a = args[i].alias_info()->beforeSets();
          const auto& b = ret.alias_info()->beforeSets();
          bool meets = false;
          for (const auto& s : b) meets |= a.count(s) > 0;
          if (meets) {
            from = static_cast<int>(i);
            view = !args[i].alias_info()->isWrite();
          }
        }
      }
      aliases.emplace_back(from, view);
      views |= view;
      if (from < 0 || view) in_place_only = false;
    }
    if (schema.returns().empty() && written.empty()) in_place_only = false;
    has_meta = op.hasKernelForDispatchKey(c10::DispatchKey::Meta) || op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
               op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
               op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    masks = name == "aten.index.Tensor";
    follower.prepare(op, name, written, views);
    ready = true;
  }

  // A mask among indices is the places where it is true, as a CUDA build expands it: how many there are is the size of the result.
  static void expand_masks(Stack& args) {
    const auto indices = args[1].toOptionalTensorVector();
    auto is_mask = [](const std::optional<at::Tensor>& t) {
      return t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte);
    };
    if (std::none_of(indices.begin(), indices.end(), is_mask)) return;
    c10::List<std::optional<at::Tensor>> expanded;
    for (const auto& t : indices) {
      if (!is_mask(t)) {
        expanded.push_back(t);
        continue;
      }
      const auto places = at::nonzero(*t);
      for (int64_t d = 0; d < t->dim(); ++d) expanded.push_back(places.select(1, d));
    }
    args[1] = expanded;
  }

  // An operator whose result is as large as the values in its arguments say: worked out, where they are known.
  bool size_by_values(const c10::OperatorHandle& op, const Stack& args, Stack* stack) {
    std::vector<at::Tensor> results;
    Follow follow = follower.take(op, args);
    if (name == "aten.masked_select.default" && !follow) {  // how many are chosen is known, not what they are
      const auto mask = args[1].toTensor();
      if (!mask.is_cuda() || !is_known(mask)) return false;
      const auto size = at::infer_size(args[0].toTensor().sizes(), mask.sizes());
      const int64_t chosen = host_values(mask).expand(size).sum().item<int64_t>();
      results.push_back(at::empty({chosen}, args[0].toTensor().options().device(at::kMeta)));
    } else {
      if (!follow || follow.chosen) return false;
      for (const auto& v : args)
        if (v.isTensor() && v.toTensor().defined() && !is_known(v.toTensor())) return false;
      {
        c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
        c10::impl::ExcludeDispatchKeyGuard no_python(
            c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
        results = follow.call->run();
      }
      follow.call->run = nullptr;
      follow.call->results = results;
      for (const auto& v : args)
        if (follow.declared && v.isTensor() && v.toTensor().is_cuda()) host_values(v.toTensor());
    }
    Entry entry;
    std::vector<at::Tensor> returned;
    for (const auto& t : results) {
      Return ret;
      Out out;
      out.sizes = t.sizes().vec();
      out.strides = t.strides().vec();
      out.dtype = t.scalar_type();
      ret.outs.push_back(out);
      entry.returns.push_back(ret);
      returned.push_back(make(out, args));
    }
    if (follow) follower.give(follow, args, returned);
    auto& r = recorder();
    const int32_t number = row(entry, args);
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    r.add(OP, current_stream(), number, r.flows ? flow(entry, args, {returned.begin(), returned.end()}) : 0);
    r.add(SYNC, current_stream(), SYNC_STREAM);  // the host reads the size before it can make the result
    for (auto& t : returned) stack->push_back(std::move(t));
    return true;
  }

  Entry ask(const c10::OperatorHandle& op, const Stack& args) {
    Entry entry;
    const auto& schema = op.schema();
    MetaMaker meta;
    Stack stack;
    for (const auto& v : args) stack.push_back(meta.value(v));
    Stack kept = stack;
    bool asked = false;
    if (has_meta) {
      c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
      c10::impl::ExcludeDispatchKeyGuard no_python(
          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
      op.callBoxed(&stack);
      asked = true;
    } else if (!in_place_only) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, "windtunnel: ", name, " cannot be emulated because it has no shape function (a kernel of its own "
                                  "without a fake implementation, or the size of its result depends on device data)");
    }
    if (asked) {
      for (int i : written) {
        if (!kept[i].isTensor() || !kept[i].toTensor().defined()) continue;
        const auto& now = kept[i].toTensor();
        const auto& was = args[i].toTensor();
        if (now.sizes() != was.sizes() || now.strides() != was.strides())
          entry.resizes.push_back({i, now.sizes().vec(), now.strides().vec()});
      }
    }
    for (size_t i = 0; i < schema.returns().size(); ++i) {
      Return ret;
      auto [from, view] = aliases[i];
      if (from >= 0 && !view) {
        ret.what = args[from].isTensor() ? Return::TENSOR : Return::LIST;
        Out out;
        out.alias = from;
        ret.outs.push_back(out);
      } else {
        const auto& v = stack[i];
        auto describe = [&](const at::Tensor& t) {
          Out out;
          out.defined = t.defined();
          if (!t.defined()) return out;
          out.sizes = t.sizes().vec();
          out.strides = t.strides().vec();
          out.offset = t.storage_offset();
          out.dtype = t.scalar_type();
          if (view) { out.alias = from; out.view = true; }
          return out;
        };
        if (v.isTensor()) ret.outs.push_back(describe(v.toTensor()));
        else if (v.isTensorList()) {
          ret.what = Return::LIST;
          for (const auto& t : v.toTensorVector()) ret.outs.push_back(describe(t));
        } else {
          ret.what = Return::PLAIN;
          ret.plain = v;
        }
      }
      entry.returns.push_back(std::move(ret));
    }
    return entry;
  }

  int32_t row(const Entry& entry, const Stack& args) {
    auto& r = recorder();
    // Views cost nothing on the device, and differ in every offset: one row for each view operator. Numbers that an
    // operator computes with differ between ranks (the part of a vocabulary that a rank holds) and change no cost.
    std::string row_key;
    if (!views) {
      for (size_t i = 0; i < args.size(); ++i) {
        if (numbers[i] && !args[i].isTensor()) row_key += '#';
        else key_value(row_key, args[i], false, false);
      }
      for (const auto& ret : entry.returns)
        for (const auto& out : ret.outs)
          for (auto n : out.sizes) put(row_key, n);
      put(row_key, r.region);
    }
    auto found = rows.find(row_key);
    if (found != rows.end()) return found->second;
    std::string s = "{\"n\":";
    json_string(s, name);
    s += ",\"i\":[";
    if (!views) {
      for (size_t i = 0; i < args.size(); ++i) {
        if (i) s += ',';
        if (numbers[i] && has_tensors && args[i].isInt()) s += "null";
        else json_value(s, args[i]);
      }
    }
    s += "],\"o\":[";
    bool first = true;
    if (!views) {
      for (const auto& ret : entry.returns) {
        for (const auto& out : ret.outs) {
          if (!out.defined || ret.what == Return::PLAIN) continue;
          auto emit = [&](const at::Tensor& t) {
            if (!first) s += ',';
            first = false;
            json_tensor(s, dtype_name(t.scalar_type()), t.sizes(), t.strides(), true);
          };
          if (out.alias >= 0) {
            if (args[out.alias].isTensor()) emit(args[out.alias].toTensor());
            else if (args[out.alias].isTensorList())
              for (const auto& t : args[out.alias].toTensorVector()) emit(t);
          } else {
            if (!first) s += ',';
            first = false;
            json_tensor(s, dtype_name(out.dtype), out.sizes, out.strides, true);
          }
        }
      }
      if (entry.returns.empty()) {  // foreach and fused operators return nothing and write their lists
        for (int i : written) {
          std::vector<at::Tensor> list;
          if (args[i].isTensorList()) list = args[i].toTensorVector();
          else if (args[i].isTensor()) list = {args[i].toTensor()};
          for (const auto& t : list) {
            if (!first) s += ',';
            first = false;
            json_tensor(s, dtype_name(t.scalar_type()), t.sizes(), t.strides(), true);
          }
        }
      }
    }
    s += "],\"r\":" + std::to_string(r.region) + "}";
    const int32_t number = r.operator_row(s);
    rows.emplace(std::move(row_key), number);
    return number;
  }

  static void collect(const IValue& v, std::vector<at::Tensor>& out) {
    if (v.isTensor()) {
      if (v.toTensor().defined()) out.push_back(v.toTensor());
    } else if (v.isTensorList() || v.isOptionalTensorList() || v.isList()) {
      for (const auto& e : v.toListRef())
        if (e.isTensor()) collect(e, out);
    }
  }

  // The tensors in the order of the row's: those of the arguments, and those of the results.
  int64_t flow(const Entry& entry, const Stack& args, const std::vector<IValue>& results) {
    std::vector<at::Tensor> read, wrote;
    if (!views) {
      for (const auto& v : args) collect(v, read);
      for (size_t i = 0; i < results.size(); ++i)
        if (entry.returns[i].what != Return::PLAIN) collect(results[i], wrote);
      if (entry.returns.empty())
        for (int i : written) collect(args[i], wrote);
    }
    return note_flow(read, wrote);
  }

  at::Tensor make(const Out& out, const Stack& args) {
    if (!out.defined) return {};
    if (out.view) {
      const auto& base = args[out.alias].toTensor();
      auto t = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(),
                                                        c10::scalarTypeToTypeMeta(out.dtype));
      t.unsafeGetTensorImpl()->set_sizes_and_strides(out.sizes, out.strides, out.offset);
      return t;
    }
    return at::detail::empty_strided_generic(out.sizes, out.strides, absent_allocator(),
                                             c10::DispatchKeySet(c10::DispatchKey::CUDA), out.dtype);
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    if (!ready) prepare(op);
    auto& r = recorder();
    const size_t count = op.schema().arguments().size();
    Stack args(std::make_move_iterator(stack->end() - count), std::make_move_iterator(stack->end()));
    stack->resize(stack->size() - count);
    note_forward_node();
    OnDevice there(device_of(args));
    if (masks) expand_masks(args);
    if (follower.sized_by_values && size_by_values(op, args, stack)) return;
    const Follow follow = follower.take(op, args);

    std::string key;
    key.reserve(128);
    for (const auto& v : args) key_value(key, v, views);
    put(key, r.region);
    auto found = table.find(key);
    if (found == table.end()) {
      Entry fresh;
      {
        // The shape function may be Python and dispatch operators of its own: none of them is the script's.
        recorder().paused++;
        try {
          fresh = ask(op, args);
        } catch (...) {
          recorder().paused--;
          throw;
        }
        recorder().paused--;
      }
      found = table.emplace(std::move(key), std::move(fresh)).first;
    }
    Entry& entry = found->second;
    if (entry.row < 0 && !r.paused) entry.row = row(entry, args);
    for (int i : written) {
      if (args[i].isTensor()) drop_shadow(args[i].toTensor());
      else if (args[i].isTensorList())
        for (const auto& t : args[i].toTensorVector()) drop_shadow(t);
    }

    for (const auto& change : entry.resizes) {
      const auto& t = args[change.arg].toTensor();
      auto* impl = t.unsafeGetTensorImpl();
      impl->set_sizes_and_strides(change.sizes, change.strides);
      int64_t need = static_cast<int64_t>(
          at::detail::computeStorageNbytes(change.sizes, change.strides, t.dtype().itemsize(), t.storage_offset()));
      auto* storage = t.storage().unsafeGetStorageImpl();
      if (need > static_cast<int64_t>(storage->nbytes())) {
        storage->set_data_ptr_noswap(absent_allocator()->allocate(need));
        storage->set_nbytes(need);
      }
    }
    std::vector<IValue> results;
    std::vector<at::Tensor> returned;  // for what is known of it
    for (const auto& ret : entry.returns) {
      if (ret.what == Return::PLAIN) results.push_back(ret.plain);
      else if (ret.outs.size() == 1 && ret.outs[0].alias >= 0 && !ret.outs[0].view) {
        results.push_back(args[ret.outs[0].alias]);
        returned.emplace_back();
      } else if (ret.what == Return::TENSOR) {
        returned.push_back(make(ret.outs[0], args));
        results.emplace_back(returned.back());
      } else {
        c10::List<at::Tensor> list;
        for (const auto& out : ret.outs) {
          returned.push_back(make(out, args));
          list.push_back(returned.back());
        }
        results.emplace_back(std::move(list));
      }
    }
    {
      std::lock_guard<std::recursive_mutex> lock(r.mutex);
      r.add(OP, current_stream(), entry.row, r.flows ? flow(entry, args, results) : 0);
    }
    if (follow) follower.give(follow, args, returned);
    // What a gradient scaler looks for is declared not to be there: with an infinity the step would be left out.
    if (checks_for_inf) set_values(args[1].toTensor(), at::zeros(args[1].toTensor().sizes()));
    for (auto& v : results) stack->push_back(std::move(v));
  }
};

}  // namespace
}  // namespace wt

// `names`: operators ("mm", "add.out", "fsdp::chunk_cat"…; of aten where nothing else is said), one a line. Each gets the one
// kernel, over a CUDA build's own; the few by hand come last, over both. Returns how many were found and registered.
extern "C" int wt_register_operators(const char* names) {
  static std::unordered_map<std::string, std::unique_ptr<torch::Library>> libraries;
  auto library = [](const std::string& space) -> torch::Library& {
    auto& known = libraries[space];
    if (!known) known = std::make_unique<torch::Library>(torch::Library::IMPL, space, c10::DispatchKey::CUDA, __FILE__, __LINE__);
    return *known;
  };
  int count = 0;
  std::string text(names), line;
  size_t at = 0;
  while (at < text.size()) {
    size_t end = text.find('\n', at);
    if (end == std::string::npos) end = text.size();
    line = text.substr(at, end - at);
    at = end + 1;
    if (line.empty()) continue;
    const auto colons = line.find("::");
    const std::string space = colons == std::string::npos ? "aten" : line.substr(0, colons);
    if (colons != std::string::npos) line = line.substr(colons + 2);
    const auto dot = line.find('.');
    c10::OperatorName name(space + "::" + line.substr(0, dot), dot == std::string::npos ? "" : line.substr(dot + 1));
    if (!c10::Dispatcher::singleton().findSchema(name)) continue;
    library(space).impl(line.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<wt::Kernel>()));
    ++count;
  }
  wt::register_by_hand(library("aten"));
  wt::register_recurrent();
  return count;
}
