"""``omni-ray plan``: what a pipeline would start, as text for people and JSON for scripts."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from omni_ray.config.pipeline import REQUEST, Edge
from omni_ray.registry import engine_entry
from omni_ray.serve.cluster import needs
from omni_ray.serve.cluster_report import ClusterReport, cluster_report
from omni_ray.serve.resolve import ResolvedApp, app_args, resolve


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage, or the ingress, in the report.

    Attributes:
        deployment: whose replicas run it; beside its own name, all about replicas is said in that one's row.
    """

    name: str
    deployment: str
    engine: str
    model: str
    output: str
    least_replicas: int
    replicas: int
    resources: dict[str, float]
    placement_group: list[dict[str, float]]
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class EdgeRow:
    """One edge in the report. ``parts``: what a request edge takes of a request."""

    source: str
    target: str
    parts: list[str]
    processor: str
    schema_version: int
    transport: str


@dataclass(frozen=True, slots=True)
class RequestRow:
    """What one kind of request runs through."""

    takes: str
    makes: str
    stages: list[str]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything ``omni-ray plan`` says."""

    pipeline: str
    description: str
    model: str | None
    stages: list[StageRow]
    ingress: StageRow
    edges: list[EdgeRow]
    requests: list[RequestRow]
    total: dict[str, float]
    cluster: ClusterReport | None

    def as_json(self) -> str:
        """For scripts."""
        return json.dumps(asdict(self), indent=2)

    def as_text(self) -> str:
        """For people."""
        lines = [f"{self.pipeline}: {self.description}", f"model: {self.model or 'from installed packages, or none'}"]
        wide = max(len("model class"), *(len(row.model) for row in self.stages))
        lines += ["", f"{'deployment':<12} {'engine':<12} {'model class':<{wide}} {'replicas':>8}  each replica"]
        for row in (*self.stages, self.ingress):
            if row.deployment != row.name:
                shares = f"in the process of {row.deployment}"
                lines.append(f"{row.name:<12} {row.engine:<12} {row.model:<{wide}} {'':>8}  {shares}")
                continue
            each = ", ".join(f"{amount:g} {name}" for name, amount in row.resources.items())
            group = f"  placement group {row.placement_group}" if row.placement_group else ""
            least = f"{row.least_replicas} to " if row.least_replicas < row.replicas else ""
            count = f"{least}{row.replicas}"
            lines.append(f"{row.name:<12} {row.engine:<12} {row.model:<{wide}} {count:>8}  {each}{group}")
        lines += ["", "in all: " + ", ".join(f"{amount:g} {name}" for name, amount in self.total.items())]
        lines += ["", "edges"]
        for edge in self.edges:
            name = edge.processor.rpartition(":")[2]
            parts = f" ({' + '.join(edge.parts)})" if edge.parts else ""
            way = f"schema {edge.schema_version}, {edge.transport}"
            lines.append(f"  {edge.source}{parts} -> {edge.target}: {name}, {way}")
        lines += ["", "requests"]
        lines += [f"  {r.takes} -> {r.makes}: {' -> '.join(r.stages)}" for r in self.requests]
        if self.cluster is not None:
            lines += self.cluster.lines()
        return "\n".join(lines)


def plan_report(name: str, given: Mapping[str, str], address: str | None = None) -> Report:
    """Resolve and report; with an ``address``, beside the cluster there. ``ConfigError`` with every problem."""
    args = app_args(given)
    app = resolve(name, args)
    total: dict[str, float] = {}
    for need in needs(app):
        for resource, amount in need.each.items():
            total[resource] = round(total.get(resource, 0) + amount * need.replicas, 3)
    front = app.ingress.derived
    return Report(
        pipeline=app.pipeline.name,
        description=app.pipeline.description,
        model=args.model or app.config.model,
        stages=_stage_rows(app),
        ingress=StageRow(
            name="ingress",
            deployment="ingress",
            engine="http",
            model="-",
            output="-",
            least_replicas=front.min_replicas,
            replicas=front.num_replicas,
            resources=dict(needs(app)[-1].each),
            placement_group=[],
            max_num_seqs=0,
        ),
        edges=[
            EdgeRow(
                edge.source,
                stage.name,
                list(edge.parts),
                edge.processor,
                edge.schema_version,
                _transport(app, edge, stage.name),
            )
            for stage in app.pipeline.topological()
            for edge in stage.inputs
        ],
        requests=_request_rows(app),
        total=total,
        cluster=cluster_report(app, address) if address else None,
    )


def _stage_rows(app: ResolvedApp) -> list[StageRow]:
    runs = {stage.stage: deployment for deployment in app.deployments for stage in deployment.stages}
    amounts = {need.deployment: need for need in needs(app)}
    rows = []
    for spec in app.stages:
        stage, deployment = app.pipeline.stage(spec.stage), runs[spec.stage]
        need, own = amounts[deployment.name], deployment.name == spec.stage
        rows.append(
            StageRow(
                name=stage.name,
                deployment=deployment.name,
                engine=engine_entry(stage, app.config.stage(stage.name).engine.get("name"))[0],
                model=spec.model_arch,
                output=stage.engine_output_type,
                least_replicas=deployment.derived.min_replicas,
                replicas=need.replicas,
                resources=dict(need.each) if own else {},
                placement_group=deployment.derived.serve.get("placement_group_bundles", []) if own else [],
                max_num_seqs=spec.engine_options.max_num_seqs,
            )
        )
    return rows


def _transport(app: ResolvedApp, edge: Edge, target: str) -> str:
    if edge.source == REQUEST:
        return "request"
    if {edge.source, target} <= {*app.config.colocate}:
        return "one process"
    if isinstance(edge.carries_refs, bool):
        return "actor path, object refs" if edge.carries_refs else "gRPC"
    return f"actor path, object refs, with {' or '.join(edge.carries_refs)}; else gRPC"


def _request_rows(app: ResolvedApp) -> list[RequestRow]:
    rows: dict[tuple[str, str], RequestRow] = {}
    for plan in app.plans:
        parts = {p for part in plan.stages for i in part.edges for p in app.pipeline.stage(part.name).inputs[i].parts}
        row = RequestRow(" + ".join(sorted(parts)), " + ".join(kind for kind, _ in plan.outputs), list(plan.names()))
        rows[row.takes, row.makes] = row
    return list(rows.values())
