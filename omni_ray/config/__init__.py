"""WHAT is served: pipelines (topology) and deploy configs (placement and sizes). Imports pydantic and yaml only."""
