{{/* What is asked of Prometheus, with the pods of one role. Real names: docs/metrics.md and SGLang's own. */}}
{{- define "oasis.pods" -}}
namespace="{{ .root.Release.Namespace }}",pod=~"{{ include "oasis.name" . }}-.+"
{{- end -}}

{{/* Replicas leave one at a time and late: with a prefill worker its tier's cached prefixes go, with a decode worker its blocks. */}}
{{- define "oasis.scaleBehavior" -}}
behavior:
  scaleUp:
    policies:
      - {type: Pods, value: 2, periodSeconds: 60}
  scaleDown:
    stabilizationWindowSeconds: 600
    policies:
      - {type: Pods, value: 1, periodSeconds: 120}
{{- end -}}
