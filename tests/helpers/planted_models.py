# ruff: noqa: E501 -- a configuration of one line is read at once
"""A repository of models for Triton: most have one planted fault, the others load.

Faults and their neighbours follow Triton's rules for a model's configuration and its files.
The name says what is planted. What Triton says of each is not written here: a live test asks it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CODE = """class TritonPythonModel:
    def execute(self, requests):
        return []
"""
ANSWERS = """import numpy
import triton_python_backend_utils as utils


class TritonPythonModel:
    def execute(self, requests):
        out = utils.Tensor("OUT", numpy.zeros((1, 1), numpy.int32))
        return [utils.InferenceResponse([out]) for _ in requests]
"""
MODEL = """name: "@"
backend: "python"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
ENSEMBLE = """name: "@"
platform: "ensemble"
max_batch_size: 8
input [ { name: "A" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "B" data_type: TYPE_INT32 dims: [ 1 ] } ]
ensemble_scheduling { step [ { model_name: "good" model_version: -1 input_map { key: "IN" value: "A" } output_map { key: "OUT" value: "B" } } ] }
"""
NO_CONFIG = "no config.pbtxt"


@dataclass(frozen=True)
class Planted:
    """``sub``: texts of the configuration that are replaced; ``append``: what follows it."""

    text: str
    code: str | bytes | None
    sub: Mapping[str, str]
    append: str
    files: Mapping[str, str | bytes]
    versions: Sequence[str]


PLANTED: dict[str, Planted] = {}


def plant(
    name: str,
    text: str = MODEL,
    code: str | bytes | None = CODE,
    *,
    sub: Mapping[str, str] | None = None,
    append: str = "",
    files: Mapping[str, str | bytes] | None = None,
    versions: Sequence[str] = ("1",),
) -> None:
    PLANTED[name] = Planted(text, code, sub or {}, append, files or {}, versions)


def ensemble(name: str, **more: object) -> None:
    plant(name, ENSEMBLE, None, **more)  # type: ignore[arg-type]


plant("good")
plant("wrong_name", sub={'"@"': '"other"'})
plant("neg_batch", sub={"max_batch_size: 8": "max_batch_size: -1"})
plant("no_batch", sub={"max_batch_size: 8\n": ""})
plant("no_backend", sub={'backend: "python"\n': ""})
plant("unknown_backend", sub={'"python"': '"pythn"'})
plant("platform_python", sub={'backend: "python"': 'platform: "python"'})
plant("platform_unknown", sub={'backend: "python"': 'platform: "tensorrt"'})
plant("plan_platform", sub={'backend: "python"': 'platform: "tensorrt_plan"'})
plant("onnx_backend", sub={'backend: "python"': 'backend: "onnxruntime"'})
plant("syntax_error", append="input [ {\n")
plant("unknown_field", append="no_such_field: 1\n")
plant("bad_enum", sub={"TYPE_INT32": "TYPE_INT33"})
plant("type_invalid", sub={"TYPE_INT32": "TYPE_INVALID"})
plant("type_number", sub={"TYPE_INT32": "8"})
plant("type_number_unknown", sub={"TYPE_INT32": "99"})
plant("no_type", sub={"data_type: TYPE_INT32 ": ""})
plant("no_dims", sub={"dims: [ 1 ]": ""})
plant("zero_dims", sub={"dims: [ 1 ]": "dims: [ 0 ]"})
plant("neg_dims", sub={"dims: [ 1 ]": "dims: [ -2 ]"})
plant("var_dims", sub={"dims: [ 1 ]": "dims: [ -1 ]"})
plant("no_input_name", sub={'name: "IN" ': ""})
plant("no_output_name", sub={'name: "OUT" ': ""})
plant("dup_input", append='input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]\n')
plant(
    "reshape_bad",
    append='input [ { name: "IN2" data_type: TYPE_INT32 dims: [ 4 ] reshape { shape: [ 3 ] } } ]\n',
)
plant(
    "reshape_var",
    append='input [ { name: "IN2" data_type: TYPE_INT32 dims: [ -1 ] reshape { shape: [ 2 ] } } ]\n',
)
plant(
    "optional_in",
    append='input [ { name: "IN2" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]\n',
)
plant(
    "shape_tensor",
    append='input [ { name: "IN2" data_type: TYPE_INT32 dims: [ 1 ] is_shape_tensor: true } ]\n',
)
plant(
    "nhwc",
    append='input [ { name: "IN2" data_type: TYPE_INT32 dims: [ 1 ] format: FORMAT_NHWC } ]\n',
)
plant("cpu_gpus", sub={"KIND_CPU count: 1": "KIND_CPU count: 1 gpus: [ 0 ]"})
plant("profile_cpu", sub={"kind: KIND_CPU": 'profile: [ "1" ] kind: KIND_CPU'})
plant("pref_over", append="dynamic_batching { preferred_batch_size: [ 16 ] }\n")
plant("pref_zero", append="dynamic_batching { preferred_batch_size: [ 0 ] }\n")
plant("pref_neg", append="dynamic_batching { preferred_batch_size: [ -4 ] }\n")
plant(
    "dyn_nobatch_pref",
    sub={"max_batch_size: 8": "max_batch_size: 0"},
    append="dynamic_batching { preferred_batch_size: [ 4 ] }\n",
)
plant("prio_nodefault", append="dynamic_batching { priority_levels: 2 }\n")
plant(
    "prio_default_over",
    append="dynamic_batching { priority_levels: 2 default_priority_level: 3 }\n",
)
plant(
    "prio_policy_over",
    append="dynamic_batching { priority_levels: 2 default_priority_level: 2 priority_queue_policy { key: 3 value: { timeout_action: REJECT } } }\n",
)
plant(
    "preserve_prio",
    append="dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 2 }\n",
)
plant("both_schedulers", append="dynamic_batching { }\nsequence_batching { }\n")
plant(
    "seq_control_ok",
    append='sequence_batching { control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] }\n',
)
plant(
    "seq_control_noname",
    append="sequence_batching { control_input [ { control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] }\n",
)
plant(
    "seq_control_both",
    append='sequence_batching { control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] fp32_false_true: [0,1] } ] } ] }\n',
)
plant(
    "seq_oldest_pref",
    append="sequence_batching { oldest { max_candidate_sequences: 4 preferred_batch_size: [ 16 ] } }\n",
)
plant("decoupled", append="model_transaction_policy { decoupled: true }\n")
plant(
    "cache_decoupled",
    append="model_transaction_policy { decoupled: true }\nresponse_cache { enable: true }\n",
)
plant("cache_seq", append="sequence_batching { }\nresponse_cache { enable: true }\n")
plant("latest_zero", append="version_policy { latest { num_versions: 0 } }\n")
plant("specific_missing", append="version_policy { specific { versions: [ 3 ] } }\n")
plant("specific_some", append="version_policy { specific { versions: [ 1, 3 ] } }\n")
plant("specific_empty", append="version_policy { specific { } }\n")
plant("all_versions", append="version_policy { all { } }\n", versions=("1", "2"))
plant("no_version_dir", versions=())
plant("version_named_v1", versions=("v1",))
plant("version_zero", versions=("0",))
plant("version_01", versions=("01",))
plant("empty_code", code="")
plant("code_syntax", code="class TritonPythonModel\n")
plant("code_no_class", code="class Other:\n    pass\n")
plant("code_import", code="import no_such_module_xyz\n" + CODE)
plant("code_no_execute", code="class TritonPythonModel:\n    pass\n")
plant("code_tabs", code="class TritonPythonModel:\n\tdef execute(self, r):\n        return []\n")
plant("code_nul", code="class TritonPythonModel:\x00\n    pass\n")
plant(
    "code_latin",
    code=b"# \xe9\nclass TritonPythonModel:\n    def execute(self, r):\n        return []\n",
)
plant(
    "default_filename_ok",
    append='default_model_filename: "other.py"\n',
    code=None,
    files={"1/other.py": CODE},
)
plant(
    "warm_ok",
    append='model_warmup [ { name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } } ]\n',
    code=ANSWERS,
)
plant(
    "warm_type",
    append='model_warmup [ { name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } } ]\n',
)
plant(
    "warm_unknown_input",
    append='model_warmup [ { name: "w" batch_size: 1 inputs { key: "INN" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } } ]\n',
)
plant(
    "warm_no_data",
    append='model_warmup [ { name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_INT32 dims: [ 1 ] } } } ]\n',
)
plant(
    "warm_file_missing",
    append='model_warmup [ { name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_INT32 dims: [ 1 ] input_data_file: "nothing" } } } ]\n',
)
plant(
    "warm_file_short",
    append='model_warmup [ { name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_INT32 dims: [ 1 ] input_data_file: "short" } } } ]\n',
    files={"warmup/short": "ab"},
)
plant(
    "warm_dims",
    append='model_warmup [ { name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_INT32 dims: [ 3 ] zero_data: true } } } ]\n',
)
plant(
    "warm_vardims",
    append='model_warmup [ { name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_INT32 dims: [ -1 ] zero_data: true } } } ]\n',
)
plant(
    "warm_missing_input",
    append='input [ { name: "IN2" data_type: TYPE_INT32 dims: [ 1 ] } ]\nmodel_warmup [ { name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } } ]\n',
)
plant(
    "warm_batch_over",
    append='model_warmup [ { name: "w" batch_size: 16 inputs { key: "IN" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } } ]\n',
)
plant(
    "warm_batch_zero",
    append='model_warmup [ { name: "w" batch_size: 0 inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } } ]\n',
)
plant("agents", append='model_repository_agents { agents [ { name: "checksum" } ] }\n')
plant(
    "param_env",
    append='parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "/nowhere/env.tar.gz" } }\n',
)
plant(
    "param_env_dir",
    append='parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }\n',
)
plant(
    "force_cpu_bad",
    append='parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value: { string_value: "maybe" } }\n',
)
plant(
    "batch_input_nosource",
    append='batch_input [ { kind: BATCH_ELEMENT_COUNT target_name: "B" data_type: TYPE_INT32 source_input: "NOPE" } ]\n',
)
plant(
    "label_missing",
    append='output [ { name: "O2" data_type: TYPE_INT32 dims: [ 1 ] label_filename: "labels.txt" } ]\n',
)
plant("not_utf8", files={"config.pbtxt": b'name: "\xff"\n'})
plant("empty_config", text="")
plant("stray_directory", NO_CONFIG, None, files={"README.md": "x"}, versions=())
plant("no_config", NO_CONFIG)
ensemble("ens_good")
ensemble("ens_no_version", versions=())
ensemble("ens_bigger", sub={"max_batch_size: 8": "max_batch_size: 16"})
ensemble("ens_smaller", sub={"max_batch_size: 8": "max_batch_size: 4"})
ensemble("ens_nobatch", sub={"max_batch_size: 8": "max_batch_size: 0"})
ensemble("ens_missing_model", sub={'model_name: "good"': 'model_name: "nope"'})
ensemble("ens_broken_model", sub={'model_name: "good"': 'model_name: "code_syntax"'})
ensemble("ens_noname_model", sub={'model_name: "good" ': ""})
ensemble("ens_version_missing", sub={"model_version: -1": "model_version: 7"})
ensemble("ens_wrong_in", sub={'key: "IN"': 'key: "INN"'})
ensemble("ens_wrong_out", sub={'key: "OUT"': 'key: "OUTT"'})
ensemble("ens_missing_in_map", sub={'input_map { key: "IN" value: "A" } ': ""})
ensemble("ens_missing_out_map", sub={' output_map { key: "OUT" value: "B" }': ""})
ensemble(
    "ens_type_mismatch", sub={'name: "A" data_type: TYPE_INT32': 'name: "A" data_type: TYPE_FP32'}
)
ensemble(
    "ens_dims_mismatch",
    sub={
        'name: "A" data_type: TYPE_INT32 dims: [ 1 ]': 'name: "A" data_type: TYPE_INT32 dims: [ 4 ]'
    },
)
ensemble("ens_unmapped_out", sub={'value: "B"': 'value: "C"'})
ensemble("ens_unused_in", append='input [ { name: "Z" data_type: TYPE_INT32 dims: [ 1 ] } ]\n')
ensemble(
    "ens_no_sched",
    sub={
        'ensemble_scheduling { step [ { model_name: "good" model_version: -1 input_map { key: "IN" value: "A" } output_map { key: "OUT" value: "B" } } ] }': ""
    },
)
ensemble(
    "ens_no_steps",
    sub={
        'step [ { model_name: "good" model_version: -1 input_map { key: "IN" value: "A" } output_map { key: "OUT" value: "B" } } ]': ""
    },
)
ensemble("ens_instance_group", append="instance_group [ { kind: KIND_CPU } ]\n")
ensemble(
    "ens_twice_written",
    sub={
        "} ] }": '}, { model_name: "good" model_version: -1 input_map { key: "IN" value: "A" } output_map { key: "OUT" value: "B" } } ] }'
    },
)
ensemble("ens_self", sub={'model_name: "good"': 'model_name: "ens_self"'})
ensemble("ens_backend_too", append='backend: "python"\n')
ensemble("ens_decoupled_policy", append="model_transaction_policy { decoupled: true }\n")
ensemble("ens_dynamic", append="dynamic_batching { }\n")
ensemble("ens_of_decoupled", sub={'model_name: "good"': 'model_name: "decoupled"'})
ensemble("ens_cache", append="response_cache { enable: true }\n")
ensemble(
    "ens_warm",
    append='model_warmup [ { name: "w" batch_size: 1 inputs { key: "A" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } } ]\n',
)
ensemble("ens_of_optional", sub={'model_name: "good"': 'model_name: "optional_in"'})
ensemble("ens_platform_backend", sub={'platform: "ensemble"': 'backend: "ensemble"'})
ensemble("ens_sched_on_python", sub={'platform: "ensemble"': 'backend: "python"'})


# Sequences, batch tensors, codes and wires.
plant("kind_model", sub={"KIND_CPU": "KIND_MODEL"})
plant("kind_auto", sub={"kind: KIND_CPU ": ""})
plant("kind_auto_gpus", sub={"kind: KIND_CPU count: 1": "count: 1 gpus: [ 0 ]"})
plant("count_zero", sub={"count: 1": "count: 0"})
plant("passive", sub={"count: 1": "count: 1 passive: true"})
plant(
    "rate_limiter",
    sub={"count: 1": 'count: 1 rate_limiter { resources [ { name: "R" count: 4 } ] priority: 2 }'},
)
plant(
    "delay_decoupled",
    append="model_transaction_policy { decoupled: true }\ndynamic_batching { max_queue_delay_microseconds: 1000 }\n",
)
plant(
    "seq_decoupled", append="model_transaction_policy { decoupled: true }\nsequence_batching { }\n"
)
plant(
    "seq_two_start",
    append='sequence_batching { control_input [ { name: "S" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] }, { name: "T" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] }\n',
)
plant("seq_control_nothing", append='sequence_batching { control_input [ { name: "S" } ] }\n')
plant(
    "seq_control_one_value",
    append='sequence_batching { control_input [ { name: "S" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 1 ] } ] } ] }\n',
)
plant(
    "seq_control_novalues",
    append='sequence_batching { control_input [ { name: "S" control [ { kind: CONTROL_SEQUENCE_START } ] } ] }\n',
)
plant(
    "seq_corrid_notype",
    append='sequence_batching { control_input [ { name: "S" control [ { kind: CONTROL_SEQUENCE_CORRID } ] } ] }\n',
)
plant(
    "seq_corrid_fp32",
    append='sequence_batching { control_input [ { name: "S" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } ] } ] }\n',
)
plant(
    "seq_corrid_ok",
    append='sequence_batching { control_input [ { name: "S" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ] }\n',
)
plant(
    "seq_state_ok",
    append='sequence_batching { state [ { input_name: "SI" output_name: "SO" data_type: TYPE_INT32 dims: [ 1 ] } ] }\n',
)
plant(
    "seq_state_init_nofile",
    append='sequence_batching { state [ { input_name: "SI" output_name: "SO" data_type: TYPE_INT32 dims: [ 1 ] initial_state { name: "i" data_type: TYPE_INT32 dims: [ 1 ] data_file: "nope" } } ] }\n',
)
plant(
    "seq_state_init_noname",
    append='sequence_batching { state [ { input_name: "SI" output_name: "SO" data_type: TYPE_INT32 dims: [ 1 ] initial_state { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } ] }\n',
)
plant(
    "seq_state_init_type",
    append='sequence_batching { state [ { input_name: "SI" output_name: "SO" data_type: TYPE_INT32 dims: [ 1 ] initial_state { name: "i" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } ] }\n',
)
plant(
    "seq_state_init_ok",
    append='sequence_batching { state [ { input_name: "SI" output_name: "SO" data_type: TYPE_INT32 dims: [ 1 ] initial_state { name: "i" data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } ] }\n',
)
plant(
    "seq_direct_util",
    append="sequence_batching { direct { minimum_slot_utilization: 2.0 max_queue_delay_microseconds: 5 } }\n",
)
plant("dup_output", append='output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]\n')
plant("batch_quoted", sub={"max_batch_size: 8": 'max_batch_size: "8"'})
plant("bool_yes", append="model_transaction_policy { decoupled: yes }\n")
plant("bool_True", append="model_transaction_policy { decoupled: True }\n")
plant("param_int", append='parameters { key: "x" value: { int_value: 3 } }\n')
plant("param_bare", append='parameters { key: "x" value: "3" }\n')
plant("trailing_comma", sub={"dims: [ 1 ] } ]\noutput": "dims: [ 1 ] }, ]\noutput"})
plant("comment_slashes", append="// a comment\n")
plant("crlf", files={"config.pbtxt": MODEL.replace("@", "crlf").replace("\n", "\r\n").encode()})
plant("bom", files={"config.pbtxt": b"\xef\xbb\xbf" + MODEL.replace("@", "bom").encode()})
plant("utf16", files={"config.pbtxt": MODEL.replace("@", "utf16").encode("utf-16")})
plant("json_config", files={"config.pbtxt": b'{"name": "json_config", "backend": "python"}'})
plant("python_upper", sub={'"python"': '"Python"'})
plant("cache_ok", append="response_cache { enable: true }\n")
plant(
    "prio_huge",
    append="dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 0 value: { timeout_action: REJECT } } }\n",
)
plant("version_latest_dir", versions=("latest",))
plant("version_mixed", versions=("1", "v2"))
plant(
    "code_import_try", code="try:\n    import no_such_xyz\nexcept ImportError:\n    pass\n" + CODE
)
plant("code_import_sibling", code="import helper\n" + CODE, files={"1/helper.py": "X = 1\n"})
plant(
    "code_class_in_if",
    code="if True:\n    class TritonPythonModel:\n        def execute(self, r):\n            return []\n",
)
plant(
    "code_class_assigned",
    code="class A:\n    def execute(self, r):\n        return []\nTritonPythonModel = A\n",
)
plant(
    "code_class_nested",
    code="class A:\n    class TritonPythonModel:\n        def execute(self, r):\n            return []\n",
)
plant("code_class_used_only", code="def f():\n    return TritonPythonModel\n")
plant(
    "batch_input_notype",
    append='batch_input [ { kind: BATCH_ELEMENT_COUNT target_name: "B" source_input: "IN" } ]\n',
)
plant(
    "batch_input_ok",
    append='batch_input [ { kind: BATCH_ELEMENT_COUNT target_name: "B" data_type: TYPE_INT32 source_input: "IN" } ]\n',
)
plant(
    "batch_input_two",
    append='batch_input [ { kind: BATCH_ELEMENT_COUNT target_name: "B" data_type: TYPE_INT32 source_input: [ "IN", "IN" ] } ]\n',
)
plant(
    "batch_input_nosrc",
    append='batch_input [ { kind: BATCH_ELEMENT_COUNT target_name: "B" data_type: TYPE_INT32 } ]\n',
)
plant(
    "batch_input_type",
    append='batch_input [ { kind: BATCH_ELEMENT_COUNT target_name: "B" data_type: TYPE_INT64 source_input: "IN" } ]\n',
)
plant(
    "batch_output_unknown",
    append='batch_output [ { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "NOPE" source_input: "IN" } ]\n',
)
plant(
    "batch_output_nosrc",
    append='batch_output [ { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "OUT" source_input: "NOPE" } ]\n',
)
plant(
    "batch_output_ok",
    append='batch_output [ { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "OUT" source_input: "IN" } ]\n',
)
plant(
    "nonlinear",
    sub={
        "data_type: TYPE_INT32 dims: [ 1 ] } ]\noutput": "data_type: TYPE_INT32 dims: [ 1 ] is_non_linear_format_io: true } ]\noutput"
    },
)
plant("runtime_nope", append='runtime: "nope.so"\n')
ensemble(
    "ens_two_ok",
    sub={
        "} ] }": '}, { model_name: "good" model_version: -1 input_map { key: "IN" value: "B" } output_map { key: "OUT" value: "C" } } ] }'
    },
)
ensemble(
    "ens_opt_input",
    sub={
        'model_name: "good"': 'model_name: "optional_in"',
        'input_map { key: "IN" value: "A" }': 'input_map { key: "IN" value: "A" } input_map { key: "IN2" value: "Z" }',
    },
    append='input [ { name: "Z" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]\n',
)
ensemble(
    "ens_out_passthrough", append='output [ { name: "A" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
)
ensemble(
    "ens_cycle_tensors",
    sub={
        'input_map { key: "IN" value: "A" } output_map { key: "OUT" value: "B" } } ] }': 'input_map { key: "IN" value: "X" } output_map { key: "OUT" value: "B" } }, { model_name: "good" model_version: -1 input_map { key: "IN" value: "B" } output_map { key: "OUT" value: "X" } }, { model_name: "good" model_version: -1 input_map { key: "IN" value: "A" } output_map { key: "OUT" value: "Y" } } ] }'
    },
)
ensemble("ens_no_output", sub={'output [ { name: "B" data_type: TYPE_INT32 dims: [ 1 ] } ]\n': ""})
ensemble(
    "ens_of_ens",
    sub={
        'model_name: "good"': 'model_name: "ens_two_ok"',
        'key: "IN"': 'key: "A"',
        'key: "OUT"': 'key: "B"',
    },
)
ensemble("ens_of_nobatch", sub={'model_name: "good"': 'model_name: "nobatch_step"'})
plant("nobatch_step", sub={"max_batch_size: 8": "max_batch_size: 0"})
ensemble(
    "ens_nobatch_ok",
    sub={
        "max_batch_size: 8": "max_batch_size: 0",
        'A" data_type: TYPE_INT32 dims: [ 1 ]': 'A" data_type: TYPE_INT32 dims: [ -1, 1 ]',
        'B" data_type: TYPE_INT32 dims: [ 1 ]': 'B" data_type: TYPE_INT32 dims: [ -1, 1 ]',
    },
)
ensemble("ens_prio", append="optimization { priority: PRIORITY_MAX }\n")
ensemble("ens_filename", append='default_model_filename: "model.py"\n')
ensemble(
    "ens_cache_dec",
    sub={'model_name: "good"': 'model_name: "decoupled"'},
    append="response_cache { enable: true }\n",
)
ensemble("ens_dup_in", append='input [ { name: "A" data_type: TYPE_INT32 dims: [ 1 ] } ]\n')
_SEQUENCES = "sequence_batching { %s }\n"
_CONTROL = '{ name: "%s" control [ { kind: CONTROL_SEQUENCE_%s %s } ] }'
plant(
    "seq2_name_twice",
    append=_SEQUENCES
    % (
        "control_input [ "
        + _CONTROL % ("S", "START", "int32_false_true: [ 0, 1 ]")
        + ", "
        + _CONTROL % ("S", "END", "int32_false_true: [ 0, 1 ]")
        + " ]"
    ),
)
plant(
    "seq2_two_kinds_one_input",
    append=_SEQUENCES
    % 'control_input [ { name: "S" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }, { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] } ]',
)
plant(
    "seq2_corrid_values",
    append=_SEQUENCES
    % (
        "control_input [ "
        + _CONTROL % ("S", "CORRID", "data_type: TYPE_UINT64 int32_false_true: [ 0, 1 ]")
        + " ]"
    ),
)
_STATE = 'state [ { input_name: "SI" output_name: "SO" data_type: TYPE_INT32 dims: [ 1 ] initial_state %s } ]'
plant(
    "seq2_init_dims",
    append=_SEQUENCES
    % (_STATE % '{ name: "i" data_type: TYPE_INT32 dims: [ 2 ] zero_data: true }'),
)
plant(
    "seq2_init_var",
    append=_SEQUENCES
    % (_STATE % '{ name: "i" data_type: TYPE_INT32 dims: [ -1 ] zero_data: true }'),
)
plant(
    "seq2_init_nodims",
    append=_SEQUENCES % (_STATE % '{ name: "i" data_type: TYPE_INT32 zero_data: true }'),
)
plant(
    "seq2_init_nodata",
    append=_SEQUENCES % (_STATE % '{ name: "i" data_type: TYPE_INT32 dims: [ 1 ] }'),
)
plant(
    "seq2_init_short",
    append=_SEQUENCES
    % (_STATE % '{ name: "i" data_type: TYPE_INT32 dims: [ 1 ] data_file: "short" }'),
    files={"initial_state/short": "ab"},
)
plant("letter_é")


def write(repository: Path, names: Sequence[str]) -> None:
    """The models ``names``, each in a directory of its name."""
    for name in names:
        planted, model = PLANTED[name], repository / name
        model.mkdir(parents=True)
        text = planted.text
        for old, new in planted.sub.items():
            assert old in text, (name, old)
            text = text.replace(old, new)
        if planted.text != NO_CONFIG:
            (model / "config.pbtxt").write_text(text.replace("@", name) + planted.append)
        for version in planted.versions:
            (model / version).mkdir()
            if planted.code is not None:
                code = planted.code
                code = code.encode() if isinstance(code, str) else code
                (model / version / "model.py").write_bytes(code)
        for path, content in planted.files.items():
            file = model / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
