"""The services of the Treadle mesh: gateway, scheduler, kv_cache and worker, each its own process.

They meet on the wire (``protos/``) and never import each other; ``services.common`` holds what at least two of
them use and that knows no service's domain. ``services/README.md`` tells a request's life from end to end.
"""
