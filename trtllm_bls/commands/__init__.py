"""The command-line clients: what they send through ``trtllm_bls.client`` and what they print.

``streaming`` (text), ``token_ids`` and ``chat`` each have a click command ``main``;
``main(argv)`` runs it. ``client/`` has a program for each.
"""
