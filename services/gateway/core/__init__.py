"""The gateway's pure parts: plain synchronous state machines without I/O, clock or event loop."""
