"""The two command-line clients: what they send through ``trtllm_bls.client`` and what they print.

``streaming.main`` (text) and ``token_ids.main`` (token ids) are click commands; ``main(argv)`` runs
one of them. ``client/`` has a program for each.
"""
