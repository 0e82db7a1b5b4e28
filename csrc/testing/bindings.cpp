// fastgrpo_math: csrc/math over numpy arrays, once for float32 (submodule f32) and once for float64 (f64), so that tests
// reach on a CPU the very functions that kernels inline. Never part of a wheel.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "../math/objective.h"
#include "../math/online_softmax.h"
#include "../math/row_power.h"
#include "../math/swiglu.h"

namespace py = pybind11;
using namespace fastgrpo;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <typename T>
SoftmaxPartial<T> partial_of(const Array<T>& logits) {
  SoftmaxPartial<T> partial;
  for (py::ssize_t i = 0; i < logits.size(); ++i) partial = push(partial, logits.data()[i]);
  return partial;
}

template <typename T>
py::dict token_terms(const ObjectiveParams& params, const Array<T>& logprob, const Array<T>& old_logprob,
                     const Array<T>& ref_logprob, const Array<T>& advantage, const Array<T>& multiplier,
                     const Array<T>& phi) {
  const py::ssize_t n = logprob.size();
  for (const Array<T>* other : {&old_logprob, &ref_logprob, &advantage, &multiplier, &phi}) {
    if (other->size() != n) throw py::value_error("all arrays must have as many elements as logprob");
  }
  Array<T> loss(n), grad(n), ratio(n), kl(n);
  py::array_t<bool> low_clipped(n), high_clipped(n), cispo_clipped(n);
  for (py::ssize_t i = 0; i < n; ++i) {
    const TokenTerm<T> term =
        token_term(params, TokenInput<T>{logprob.data()[i], old_logprob.data()[i], ref_logprob.data()[i],
                                         advantage.data()[i], multiplier.data()[i], phi.data()[i]});
    loss.mutable_data()[i] = term.loss;
    grad.mutable_data()[i] = term.grad;
    ratio.mutable_data()[i] = term.ratio;
    kl.mutable_data()[i] = term.kl;
    low_clipped.mutable_data()[i] = term.low_clipped;
    high_clipped.mutable_data()[i] = term.high_clipped;
    cispo_clipped.mutable_data()[i] = term.cispo_clipped;
  }
  using namespace py::literals;
  return py::dict("loss"_a = loss, "grad"_a = grad, "ratio"_a = ratio, "kl"_a = kl, "low_clipped"_a = low_clipped,
                  "high_clipped"_a = high_clipped, "cispo_clipped"_a = cispo_clipped);
}

template <typename T>
void bind(py::module_ m) {
  using Partial = SoftmaxPartial<T>;
  py::class_<Partial>(m, "SoftmaxPartial")
      .def(py::init<>())
      .def(py::init([](T max, T sum, T weighted) { return Partial{max, sum, weighted}; }))
      .def_readonly("max", &Partial::max)
      .def_readonly("sum", &Partial::sum)
      .def_readonly("weighted", &Partial::weighted);
  m.def("partial", &partial_of<T>, "the partial of a 1-d array of logits, pushed one by one");
  m.def("combine", [](const Partial& a, const Partial& b) { return combine(a, b); });
  m.def("finalize", [](const Partial& others, T target_logit) {
    const SoftmaxResult<T> result = finalize(others, target_logit);
    return py::make_tuple(result.logprob, result.lse, result.entropy);
  });
  m.def("target_complement", py::vectorize([](T logprob) { return target_complement(logprob); }));
  m.def("row_power", py::vectorize([](T g, T h) { return row_power(g, h); }));
  m.def("token_terms", &token_terms<T>, py::arg("params"), py::arg("logprob"), py::arg("old_logprob"),
        py::arg("ref_logprob"), py::arg("advantage"), py::arg("multiplier"), py::arg("phi"));
  m.def("vespo_log_ratio", py::vectorize([](T log_ratio) { return vespo_log_ratio(log_ratio); }));
  m.def("vespo_log_sampler", py::vectorize([](T ratio) { return vespo_log_sampler(ratio); }));
  m.def("vespo_phi", py::vectorize([](T log_w, T advantage, T k_pos, T lambda_pos, T k_neg, T lambda_neg) {
          return vespo_phi(log_w, advantage, k_pos, lambda_pos, k_neg, lambda_neg);
        }));
  m.def("sampler_ratio", py::vectorize([](T log_ratio, bool truncate, T low, T high) {
          return sampler_ratio(log_ratio, truncate ? SamplerClip::truncate : SamplerClip::mask, low, high);
        }));
  m.def("swiglu", py::vectorize([](T gate, T up) { return swiglu(gate, up); }));
  m.def("swiglu_grad_gate", py::vectorize([](T gate, T up, T grad) { return swiglu_grad(gate, up, grad).gate; }));
  m.def("swiglu_grad_up", py::vectorize([](T gate, T up, T grad) { return swiglu_grad(gate, up, grad).up; }));
  m.def("swiglu_grad_product", py::vectorize([](T gate, T up, T grad) { return swiglu_grad(gate, up, grad).product; }));
}

}  // namespace

PYBIND11_MODULE(fastgrpo_math, m) {
  py::enum_<LossType>(m, "LossType")
      .value("grpo", LossType::grpo)
      .value("bnpo", LossType::bnpo)
      .value("dr_grpo", LossType::dr_grpo)
      .value("dapo", LossType::dapo)
      .value("luspo", LossType::luspo)
      .value("cispo", LossType::cispo)
      .value("sapo", LossType::sapo)
      .value("vespo", LossType::vespo);
  py::class_<ObjectiveParams>(m, "ObjectiveParams")
      .def(py::init<>())
      .def_readwrite("loss_type", &ObjectiveParams::loss_type)
      .def_readwrite("epsilon_low", &ObjectiveParams::epsilon_low)
      .def_readwrite("epsilon_high", &ObjectiveParams::epsilon_high)
      .def_readwrite("delta", &ObjectiveParams::delta)
      .def_readwrite("beta", &ObjectiveParams::beta)
      .def_readwrite("bias_correct_kl", &ObjectiveParams::bias_correct_kl)
      .def_readwrite("sapo_temperature_pos", &ObjectiveParams::sapo_temperature_pos)
      .def_readwrite("sapo_temperature_neg", &ObjectiveParams::sapo_temperature_neg);
  bind<float>(m.def_submodule("f32"));
  bind<double>(m.def_submodule("f64"));
}
