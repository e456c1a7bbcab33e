"""One text request, from its arrival to its report.

``orchestrator`` runs the request, ``admission`` gives it a place, ``deployment`` makes an
orchestrator of parameters. ``reports`` has metrics and the log of requests, ``log_lines`` the form
of log lines, ``output`` the streams that they go to, ``lifecycle`` and ``status`` the drain and
what a process tells others.
"""
