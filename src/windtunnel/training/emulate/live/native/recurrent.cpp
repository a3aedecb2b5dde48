// Recurrent layers choose cuDNN on CUDA by a table of function pointers: these entries call the operator that a CUDA
// build's entries call (aten/src/ATen/native/cudnn/RNN.cpp), which is then answered by its shape function.
#include <ATen/ATen.h>
#include <ATen/native/RNN.h>

namespace wt {
namespace {

using at::Tensor;
using at::TensorList;

enum Mode { RELU = 0, TANH = 1, LSTM = 2, GRU = 3 };  // cudnnRNNMode_t

std::array<Tensor, 3> call(Mode mode, const Tensor& input, const Tensor& hx, const Tensor& cx, TensorList weights, bool biases,
                           int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first, at::IntArrayRef sizes) {
  const int64_t hidden = cx.defined() ? cx.size(2) : hx.size(2);
  const int64_t projection = cx.defined() && cx.size(2) != hx.size(2) ? hx.size(2) : 0;
  const int64_t stride = (biases ? 4 : 2) + (projection ? 1 : 0);
  const std::optional<Tensor> cell = cx.defined() ? std::optional<Tensor>(cx) : std::nullopt;
  // The layer's weights lie in one buffer, which it is given as well: here a name for it that nobody reads.
  int64_t total = 0;
  for (const auto& w : weights) total += w.numel();
  auto buffer = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(weights[0].storage()),
                                                         weights[0].key_set(), weights[0].dtype());
  buffer.unsafeGetTensorImpl()->set_sizes_contiguous({total});
  auto out = at::_cudnn_rnn(input, weights, stride, buffer, hx, cell, mode, hidden, projection, layers, batch_first,
                            dropout, train, bidirectional, sizes, std::nullopt);
  return {std::get<0>(out), std::get<1>(out), std::get<2>(out)};
}

at::IntArrayRef rows(const Tensor& sizes) { return {sizes.data_ptr<int64_t>(), static_cast<size_t>(sizes.size(0))}; }

void lstm(Tensor& out, Tensor& hy, Tensor& cy, const Tensor& input, TensorList hidden, TensorList weights, bool biases,
          int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  auto r = call(LSTM, input, hidden[0], hidden[1], weights, biases, layers, dropout, train, bidirectional, batch_first, {});
  out = r[0], hy = r[1], cy = r[2];
}

void lstm_packed(Tensor& out, Tensor& hy, Tensor& cy, const Tensor& data, const Tensor& sizes, TensorList hidden,
                 TensorList weights, bool biases, int64_t layers, double dropout, bool train, bool bidirectional) {
  auto r = call(LSTM, data, hidden[0], hidden[1], weights, biases, layers, dropout, train, bidirectional, false, rows(sizes));
  out = r[0], hy = r[1], cy = r[2];
}

template <Mode mode>
void plain(Tensor& out, Tensor& hy, const Tensor& input, const Tensor& hx, TensorList weights, bool biases, int64_t layers,
           double dropout, bool train, bool bidirectional, bool batch_first) {
  auto r = call(mode, input, hx, {}, weights, biases, layers, dropout, train, bidirectional, batch_first, {});
  out = r[0], hy = r[1];
}

template <Mode mode>
void plain_packed(Tensor& out, Tensor& hy, const Tensor& data, const Tensor& sizes, const Tensor& hx, TensorList weights,
                  bool biases, int64_t layers, double dropout, bool train, bool bidirectional) {
  auto r = call(mode, data, hx, {}, weights, biases, layers, dropout, train, bidirectional, false, rows(sizes));
  out = r[0], hy = r[1];
}

}  // namespace

void register_recurrent() {
  using namespace at::native;
  lstm_cudnn_stub.set_cuda_dispatch_ptr(&lstm);
  lstm_packed_cudnn_stub.set_cuda_dispatch_ptr(&lstm_packed);
  gru_cudnn_stub.set_cuda_dispatch_ptr(&plain<GRU>);
  gru_packed_cudnn_stub.set_cuda_dispatch_ptr(&plain_packed<GRU>);
  rnn_tanh_cudnn_stub.set_cuda_dispatch_ptr(&plain<TANH>);
  rnn_tanh_packed_cudnn_stub.set_cuda_dispatch_ptr(&plain_packed<TANH>);
  rnn_relu_cudnn_stub.set_cuda_dispatch_ptr(&plain<RELU>);
  rnn_relu_packed_cudnn_stub.set_cuda_dispatch_ptr(&plain_packed<RELU>);
}

}  // namespace wt
