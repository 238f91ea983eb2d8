"""Schemas, by hand, of what the chart uses of custom resources: field names and types as their projects document them.

Sources: prometheus-operator ``monitoring.coreos.com/v1``, KEDA ``keda.sh/v1alpha1``, LWS ``leaderworkerset.x-k8s.io/v1``.
"""

from __future__ import annotations

DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h|d))+$"}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}
COUNT_OR_SHARE = {"anyOf": [COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}


def fields(required: list[str], **properties) -> dict:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def listed(item: dict, least: int = 1) -> dict:
    return {"type": "array", "minItems": least, "items": item}


TEXT = {"type": "string", "minLength": 1}
SELECTOR = fields(["matchLabels"], matchLabels=STRINGS)
ENDPOINT = fields(["port"], port=TEXT, path={"type": "string", "pattern": "^/"}, interval=DURATION)
ALERT = fields(["alert", "expr", "labels", "annotations"], alert={"type": "string", "pattern": "^[A-Z][A-Za-z]+$"}, expr=TEXT, labels=STRINGS,
               annotations=STRINGS, **{"for": DURATION})
RULE = {"oneOf": [ALERT, fields(["record", "expr"], record=TEXT, expr=TEXT, labels=STRINGS)]}
POLICIES = listed(fields(["type", "value", "periodSeconds"], type={"enum": ["Pods", "Percent"]}, value=COUNT, periodSeconds=COUNT))
BEHAVIOR = fields([], scaleUp=fields(["policies"], policies=POLICIES, stabilizationWindowSeconds=COUNT),
                  scaleDown=fields(["policies"], policies=POLICIES, stabilizationWindowSeconds=COUNT))
TRIGGER = fields(["type", "metadata"], type={"const": "prometheus"}, name=TEXT, metricType={"enum": ["AverageValue", "Value"]},
                 metadata=fields(["serverAddress", "query", "threshold"], serverAddress=TEXT, query=TEXT, threshold={"type": "string", "pattern": r"^[0-9.]+$"},
                                 ignoreNullValues={"enum": ["true", "false"]}))

SPECS = {
    ("monitoring.coreos.com/v1", "PodMonitor"): fields(["selector", "podMetricsEndpoints"], selector=SELECTOR, podTargetLabels=listed(TEXT),
                                                       podMetricsEndpoints=listed(ENDPOINT)),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): fields(["selector", "endpoints"], selector=SELECTOR, targetLabels=listed(TEXT), endpoints=listed(ENDPOINT)),
    ("monitoring.coreos.com/v1", "PrometheusRule"): fields(["groups"], groups=listed(fields(["name", "rules"], name=TEXT, rules=listed(RULE)))),
    ("keda.sh/v1alpha1", "ScaledObject"): fields(
        ["scaleTargetRef", "triggers"], scaleTargetRef=fields(["name"], apiVersion=TEXT, kind=TEXT, name=TEXT), pollingInterval=COUNT, minReplicaCount=COUNT,
        maxReplicaCount=COUNT, triggers=listed(TRIGGER), advanced=fields([], horizontalPodAutoscalerConfig=fields([], behavior=BEHAVIOR))),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): fields(
        ["leaderWorkerTemplate"], replicas=COUNT, startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        networkConfig=fields(["subdomainPolicy"], subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
        rolloutStrategy=fields(["type"], type={"const": "RollingUpdate"}, rollingUpdateConfiguration=fields(
            ["maxUnavailable", "maxSurge"], maxUnavailable=COUNT_OR_SHARE, maxSurge=COUNT_OR_SHARE)),
        leaderWorkerTemplate=fields(["workerTemplate", "size"], size={"type": "integer", "minimum": 1}, workerTemplate={"type": "object"},
                                    restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]})),
}


def schema(api: str, kind: str) -> dict:
    """Of a whole object. Raises ``KeyError`` for a kind that is not here."""
    return fields(["apiVersion", "kind", "metadata", "spec"], apiVersion={"const": api}, kind={"const": kind}, spec=SPECS[api, kind],
                  metadata=fields(["name", "namespace", "labels"], name=TEXT, namespace=TEXT, labels=STRINGS))
