{{/* Names, labels and arithmetic. Templates of roles get (dict "root" $ "role" NAME "values" SECTION). */}}

{{- define "oasis.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "oasis.name" -}}
{{ include "oasis.fullname" .root }}-{{ .role }}
{{- end -}}

{{/* What selects the pods of a role; never changes in the life of a release. */}}
{{- define "oasis.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{/* What selects those of them that take requests. */}}
{{- define "oasis.endpoints" -}}
{{ include "oasis.selector" . }}
{{- if gt (int .values.nodes) 1 }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end -}}

{{- define "oasis.labels" -}}
{{ include "oasis.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "oasis.metadata" -}}
name: {{ include "oasis.name" . }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "oasis.labels" . | nindent 2 }}
{{- end -}}

{{/* "images": fields of image that a role replaces, the last one wins; a role's own tag wins over a digest that is not its own. */}}
{{- define "oasis.image" -}}
{{- $image := deepCopy .root.Values.image -}}
{{- range .images -}}
{{- if .tag }}{{ $_ := set $image "digest" "" }}{{ end -}}
{{- $image = mergeOverwrite $image (deepCopy .) -}}
{{- end -}}
{{- with $image -}}
image: "{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default (printf "%s-cuda" $.root.Chart.AppVersion) }}{{ end }}"
imagePullPolicy: {{ .pullPolicy }}
{{- end }}
{{- end -}}

{{/* Bytes of a quantity. */}}
{{- define "oasis.bytes" -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $text := toString . -}}
{{- mul (regexFind "^[0-9]+" $text | int64) (get $units (regexFind "[A-Za-z]*$" $text) | default 1) -}}
{{- end -}}

{{/* Requests and limits of a container: "memory" lists what it has to hold, "extra" is added to both. Fails below that. */}}
{{- define "oasis.resources" -}}
{{- $needed := 0 -}}
{{- range .memory }}{{ $needed = add $needed (include "oasis.bytes" . | int64) }}{{ end -}}
{{- $requests := deepCopy (.resources.requests | default dict) -}}
{{- $limits := deepCopy (.resources.limits | default dict) -}}
{{- $memory := printf "%dMi" (div (add $needed 1048575) 1048576) -}}
{{- range $of, $given := dict "requests" $requests "limits" $limits -}}
{{- range $name, $_ := $given }}{{ if hasPrefix "hugepages-" $name }}{{ fail (printf "%s.resources.%s: %s belongs into %s.hugepages" $.path $of $name $.path) }}{{ end }}
{{- if hasKey $.extra $name }}{{ fail (printf "%s.resources.%s: %s is counted by the chart (gpuResource, model.tensorParallel, transfer.rdma)" $.path $of $name) }}{{ end }}{{ end -}}
{{- if and $given.memory (lt (include "oasis.bytes" $given.memory | int64) $needed) -}}
{{- fail (printf "%s.resources.%s.memory: %s is below %s = %s, which it has to hold" $.path $of $given.memory (join " + " $.memory) $memory) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $limits "memory" ($limits.memory | default $requests.memory | default $memory) -}}
{{- $_ := set $requests "memory" ($requests.memory | default $memory) -}}
{{- if lt (include "oasis.bytes" $limits.memory | int64) (include "oasis.bytes" $requests.memory | int64) -}}
{{- fail (printf "%s.resources: limits.memory %s is below requests.memory %s" .path $limits.memory $requests.memory) -}}
{{- end -}}
resources:
  requests:
    {{- merge $requests .extra | toYaml | nindent 4 }}
  limits:
    {{- merge $limits .extra | toYaml | nindent 4 }}
{{- end -}}

{{/* Whether the tier shares the pod of prefill: "yes" or nothing. */}}
{{- define "oasis.sidecar" -}}
{{- ne .Values.tier.mode "daemonset" | ternary "yes" "" -}}
{{- end -}}

{{/* "yes" where users are 0 for the sake of IPC_LOCK. */}}
{{- define "oasis.pins" -}}
{{- if and .Values.transfer.rdma.resource (eq .Values.transfer.rdma.memlock "capability") }}yes{{ end -}}
{{- end -}}

{{/* Apiversion, kind and name of what scales a role of workers. */}}
{{- define "oasis.target" -}}
{{- $kind := eq .role "prefill" | ternary "StatefulSet" "Deployment" -}}
{{- if gt (int .values.nodes) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: {{ $kind }}
{{- end }}
name: {{ include "oasis.name" . }}
{{- end -}}

{{/* Bootstrap addresses of all prefill workers, which have fixed names: where decode has a prompt computed again. */}}
{{- define "oasis.prefills" -}}
{{- $name := include "oasis.name" (dict "root" . "role" "prefill") -}}
{{- $scale := .Values.prefill.autoscaling -}}
{{- $count := eq $scale.kind "none" | ternary .Values.prefill.replicas $scale.maxReplicas | int -}}
{{- $found := list -}}
{{- range until $count -}}
{{- $found = append $found (printf "%s-%d.%s.%s.svc:%d" $name . $name $.Release.Namespace (int $.Values.ports.bootstrap)) -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}
