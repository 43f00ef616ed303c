"""The HTTP service: a front end that knows HTTP and text, and an engine process that knows everything else.

    client ─ HTTP ─▶ ingress ─▶ routes ─▶ EnginePort ─ one Unix socket ─▶ worker ─▶ Engine
                     (front end: no torch)                                (engine process)

If the engine process dies, the front end fails every open request, stays up, and starts another one.
"""
