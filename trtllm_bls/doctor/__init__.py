"""``trtllm-bls doctor``: finds what is wrong with a deployment before the first request.

``findings`` has the list of checks and runs them, ``subject`` what they look at. The checks are in
``repository`` (parameters and engines), ``text`` (tokenizers), ``machine`` and ``server``. They
change nothing; where a rule exists elsewhere in the package, it is asked there.
"""

from trtllm_bls.doctor.command import command

__all__ = ["command"]
