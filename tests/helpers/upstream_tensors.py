"""TensorRT-LLM's own tensors, copied by hand from descriptions of its last release.

One row each: name, type, dims without the batch, then ``r`` required, ``s`` reshaped to a scalar,
``R`` ragged batches allowed. Made apart from ``wire.contract``, so that a slip in either is
seen. The two older spellings (``min_length``, ``random_seed``) are rows of their own.
"""

TENSORRT_LLM_INPUTS = """
input_ids INT32 [-1] r R
input_lengths INT32 [1] r s
request_output_len INT32 [1] r s
num_return_sequences INT32 [1] s
draft_input_ids INT32 [-1] R
draft_logits FP32 [-1,-1] R
draft_acceptance_threshold FP32 [1] s
end_id INT32 [1] s
pad_id INT32 [1] s
stop_words_list INT32 [2,-1] R
bad_words_list INT32 [2,-1] R
embedding_bias FP32 [-1] R
beam_width INT32 [1] s
temperature FP32 [1] s
runtime_top_k INT32 [1] s
runtime_top_p FP32 [1] s
runtime_top_p_min FP32 [1] s
runtime_top_p_decay FP32 [1] s
runtime_top_p_reset_ids INT32 [1] s
len_penalty FP32 [1] s
early_stopping BOOL [1] s
repetition_penalty FP32 [1] s
min_tokens INT32 [1] s
min_length INT32 [1] s
beam_search_diversity_rate FP32 [1] s
presence_penalty FP32 [1] s
frequency_penalty FP32 [1] s
seed UINT64 [1] s
random_seed UINT64 [1] s
return_log_probs BOOL [1] s
return_context_logits BOOL [1] s
return_generation_logits BOOL [1] s
return_perf_metrics BOOL [1] s
return_num_input_tokens BOOL [1] s
return_num_output_tokens BOOL [1] s
exclude_input_in_output BOOL [1] s
stop BOOL [1] s
streaming BOOL [1] s
prompt_embedding_table FP16 [-1,-1] R
prompt_vocab_size INT32 [1] s
prompt_table_extra_ids UINT64 [-1] R
lora_task_id UINT64 [1] s
lora_weights FP16 [-1,-1] R
lora_config INT32 [-1,3] R
decoder_input_ids INT32 [-1] R
decoder_input_lengths INT32 [1] s
retention_token_range_starts INT32 [-1] R
retention_token_range_ends INT32 [-1] R
retention_token_range_priorities INT32 [-1] R
retention_token_range_durations_ms INT32 [-1] R
retention_decode_priority INT32 [1] R
retention_decode_duration_ms INT32 [1] R
guided_decoding_guide_type STRING [1] R
guided_decoding_guide STRING [1] R
lookahead_window_size INT32 [1] R
lookahead_ngram_size INT32 [1] R
lookahead_verification_set_size INT32 [1] R
"""

_FIGURES = """
cum_log_probs FP32 [-1]
output_log_probs FP32 [-1,-1]
context_logits FP32 [-1,-1]
generation_logits FP32 [-1,-1,-1]
batch_index INT32 [1]
sequence_index INT32 [1]
kv_cache_alloc_new_blocks INT32 [1]
kv_cache_reused_blocks INT32 [1]
kv_cache_alloc_total_blocks INT32 [1]
arrival_time_ns INT64 [1]
first_scheduled_time_ns INT64 [1]
first_token_time_ns INT64 [1]
last_token_time_ns INT64 [1]
acceptance_rate FP32 [1]
total_accepted_draft_tokens INT32 [1]
total_draft_tokens INT32 [1]
num_input_tokens INT32 [1]
num_output_tokens INT32 [1]
"""

TENSORRT_LLM_OUTPUTS = (
    """
output_ids INT32 [-1,-1]
sequence_length INT32 [-1]
"""
    + _FIGURES
)

PREPROCESSING_INPUTS = """
QUERY STRING [1] r
REQUEST_OUTPUT_LEN INT32 [1] r
BAD_WORDS_DICT STRING [-1]
STOP_WORDS_DICT STRING [-1]
EMBEDDING_BIAS_WORDS STRING [-1]
EMBEDDING_BIAS_WEIGHTS FP32 [-1]
END_ID INT32 [1]
PAD_ID INT32 [1]
"""

PREPROCESSING_OUTPUTS = """
INPUT_ID INT32 [-1]
REQUEST_INPUT_LEN INT32 [1]
BAD_WORDS_IDS INT32 [2,-1]
STOP_WORDS_IDS INT32 [2,-1]
EMBEDDING_BIAS FP32 [-1]
REQUEST_OUTPUT_LEN INT32 [-1]
OUT_END_ID INT32 [1]
OUT_PAD_ID INT32 [1]
DECODER_INPUT_ID INT32 [-1]
REQUEST_DECODER_INPUT_LEN INT32 [1]
"""

POSTPROCESSING_INPUTS = """
TOKENS_BATCH INT32 [-1,-1] r
SEQUENCE_LENGTH INT32 [-1] r
"""

POSTPROCESSING_OUTPUTS = """
OUTPUT STRING [-1]
"""

_TEXT_INPUTS = """
text_input STRING [1] r
max_tokens INT32 [1] r
bad_words STRING [-1]
stop_words STRING [-1]
end_id INT32 [1]
pad_id INT32 [1]
top_k INT32 [1]
beam_width INT32 [1]
top_p FP32 [1]
temperature FP32 [1]
length_penalty FP32 [1]
repetition_penalty FP32 [1]
presence_penalty FP32 [1]
frequency_penalty FP32 [1]
min_tokens INT32 [1]
min_length INT32 [1]
seed UINT64 [1]
random_seed UINT64 [1]
stream BOOL [1]
prompt_embedding_table FP16 [-1,-1]
prompt_vocab_size INT32 [1]
embedding_bias_words STRING [-1]
embedding_bias_weights FP32 [-1]
lora_weights FP16 [-1,-1] R
lora_config INT32 [-1,3] R
exclude_input_in_output BOOL [1]
"""

ENSEMBLE_INPUTS = (
    _TEXT_INPUTS
    + """
return_log_probs BOOL [1]
return_context_logits BOOL [1]
return_generation_logits BOOL [1]
return_perf_metrics BOOL [1]
return_num_input_tokens BOOL [1]
return_num_output_tokens BOOL [1]
num_return_sequences INT32 [1]
lora_task_id UINT64 [1]
guided_decoding_guide_type STRING [1] R
guided_decoding_guide STRING [1] R
"""
)

ENSEMBLE_OUTPUTS = (
    """
text_output STRING [-1]
"""
    + _FIGURES
)

TENSORRT_LLM_BLS_INPUTS = (
    _TEXT_INPUTS
    + """
prompt_table_extra_id UINT64 [1]
return_log_probs BOOL [1] s
return_context_logits BOOL [1] s
return_generation_logits BOOL [1] s
return_perf_metrics BOOL [1] s
return_num_input_tokens BOOL [1] s
return_num_output_tokens BOOL [1] s
num_return_sequences INT32 [1] s
num_draft_tokens INT32 [1]
use_draft_logits BOOL [1] s
lora_task_id UINT64 [1] s
guided_decoding_guide_type STRING [1]
guided_decoding_guide STRING [1]
"""
)

TENSORRT_LLM_BLS_OUTPUTS = ENSEMBLE_OUTPUTS
