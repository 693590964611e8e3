"""WHERE IT RUNS: Ray Serve deployments, the request's way through them, and the HTTP ingress."""
