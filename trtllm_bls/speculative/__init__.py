"""Speculative decoding as decisions without I/O; ``engines.routing`` acts on them.

``rounds`` what to do next, the state machine that all the others serve; ``options`` what callers
may choose; ``progress`` one answer, its engine requests and what their responses add; ``ngrams``
drafts from texts, finished answers among them; ``shared`` what requests learn from one another, and
the draft length that pays.
"""
