"""Checks Kubernetes manifests without a cluster: ``kubectl kustomize DIR | python -m tests.k8s.validate``.

Takes files, or standard input. Exit code 1 if there is a problem. It cannot see what only a cluster knows: quota, node
labels, admission policies, whether images, Secrets and claims exist.
"""

import sys
from pathlib import Path

import yaml

from tests.k8s.crd_schema import Doc, check_schema, load_documents
from tests.k8s.operator_rules import check_operator_rules
from tests.k8s.serve_config import check_serve_config
from tests.k8s.serving_rules import check_serving_rules, container_problems


def problems_of(doc: Doc) -> list[str]:
    """Problems of one document; each layer needs the one before it to be clean."""
    if problems := check_schema(doc):
        return problems
    if doc["kind"] == "Job":
        pod = doc["spec"]["template"]["spec"]
        return [p for c in pod["containers"] for p in container_problems(c["name"], pod, c)]
    if doc["kind"] != "RayService":
        return []
    return [*check_operator_rules(doc), *check_serve_config(doc)] or list(check_serving_rules(doc))


def main(paths: list[str]) -> int:
    """Print the problems of every document."""
    failed = False
    texts = [(path, Path(path).read_text()) for path in paths] or [("standard input", sys.stdin.read())]
    for where, text in texts:
        try:
            documents = load_documents(text)
        except yaml.YAMLError as error:
            print(f"{where}: {error}")
            failed = True
            continue
        for doc in documents:
            problems = problems_of(doc)
            failed |= bool(problems)
            name = (doc.get("metadata") or {}).get("name")
            print(f"{where}: {doc.get('kind')}/{name}: {len(problems)} problem(s)", *problems, sep="\n  ")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
