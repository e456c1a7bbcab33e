"""The names of the models in a repository, which directories, configurations and clients have.

``MODELS`` of the wire's ``contract`` has their tensors, ``parameters_of`` their parameters.
"""

PREPROCESSING_NAME = "preprocessing"
ENGINE_NAME = "tensorrt_llm"
POSTPROCESSING_NAME = "postprocessing"
ENSEMBLE_NAME = "ensemble"
BLS_NAME = "tensorrt_llm_bls"
DRAFT_NAME = "tensorrt_llm_draft"  # a second engine, which makes drafts

# What Triton calls a configuration without code, in the field ``platform``.
ENSEMBLE_PLATFORM = "ensemble"
