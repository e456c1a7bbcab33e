"""Speculative decoding as decisions without I/O; ``engines.routing.speculative`` acts on them.

``rounds`` what to do next, the state machine that all the others serve; ``options`` what callers
may choose, and the figures; ``progress`` what one round means; ``round_requests`` the engine
requests of each round; ``answer_figures`` sums over all rounds; ``ngrams`` drafts from texts,
``memory`` the finished answers among them; ``cost_model`` measured times; ``shared`` what requests
learn from one another, and the length that pays; ``draft_length`` how many tokens the draft model
is asked for.
"""
