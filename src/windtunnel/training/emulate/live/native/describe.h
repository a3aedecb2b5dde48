// Tensors and plain values in words: JSON for the table of operators, and bytes for the key of a call.
#pragma once
#include <string>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

namespace wt {

const char* dtype_name(c10::ScalarType t);

void json_ints(std::string& s, c10::IntArrayRef v);
void json_string(std::string& s, const std::string& text);
void json_tensor(std::string& s, const char* dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides, bool cuda);
void json_value(std::string& s, const c10::IValue& v);
std::string tensor_text(const at::Tensor& t);

template <typename T>
void put(std::string& key, T value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// `place`: the storage's size and the offset in it count (they decide what a view is).
void key_tensor(std::string& key, const at::Tensor& t, bool place);
// `floats`: whether floating-point values count. They can decide a shape, but not what an operator costs.
void key_value(std::string& key, const c10::IValue& v, bool place, bool floats = true);

}  // namespace wt
