"""gRPC as the mesh uses it: servers, channels, streams, and the translation between errors and statuses."""
