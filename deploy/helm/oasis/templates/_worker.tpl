{{/* Pods of the workers, prefill and decode. Given "root", "role" and "values". */}}

{{- define "oasis.workerBody" -}}
{{- $v := .root.Values -}}
{{- $several := gt (int .values.nodes) 1 -}}
{{- $local := hasPrefix "/" $v.model.path -}}
env:
  {{- $more := list (dict "name" "SGLANG_HOST_IP" "value" "$(POD_IP)") -}}
  {{- /* /health then says whether this process runs, and not what its queue looks like; /health_generate still computes a token. */ -}}
  {{- $more = append $more (dict "name" "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION" "value" "false") -}}
  {{- if $local }}{{ $more = append $more (dict "name" "HF_HUB_OFFLINE" "value" "1") }}{{ end -}}
  {{- if and $v.model.volume (not $v.model.readOnly) }}{{ $more = append $more (dict "name" "HF_HOME" "value" (printf "%s/huggingface" $v.model.mountPath)) }}{{ end -}}
  {{- with $v.model.tokenSecret }}{{ if .name }}{{ $more = append $more (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" (dict "name" .name "key" .key))) }}{{ end }}{{ end -}}
  {{- include "oasis.env" (dict "root" .root "ucx" (or $several (eq .role "decode")) "more" (toYaml $more) "env" .values.extraEnv) | nindent 2 }}
{{ include "oasis.restricted" (dict "root" .root "pins" (or $several (eq .role "decode"))) }}
{{ include "oasis.resources" (dict "path" .role "memory" (compact (list .values.baseMemory .values.shmSize .values.hostCache)) "resources" .values.resources
     "extra" (include "oasis.devices" (dict "root" .root "values" .values "rdma" (or $several (eq .role "decode")) "gpus" (div (int $v.model.tensorParallel) (int .values.nodes))) | fromYaml)) }}
volumeMounts:
  {{- include "oasis.mounts" (dict "shm" true "socket" (eq .role "prefill") "keys" .keys "hugepages" .values.hugepages) | nindent 2 }}
  {{- if $v.model.volume }}
  - {name: model, mountPath: {{ $v.model.mountPath }}, readOnly: {{ $v.model.readOnly }}}
  {{- end }}
{{- end -}}

{{- define "oasis.workerContainer" -}}
{{- $v := .root.Values -}}
- name: {{ .role }}
  {{- include "oasis.image" . | nindent 2 }}
  args:
    - {{ .role }}
    - --model-path
    - {{ $v.model.path | quote }}
    {{- with $v.model.servedName }}
    - --served-model-name
    - {{ . | quote }}
    {{- end }}
    - --host
    - 0.0.0.0
    - --port
    - {{ $v.ports.worker | quote }}
    {{- if gt (int $v.model.tensorParallel) 1 }}
    - --tp-size
    - {{ $v.model.tensorParallel | quote }}
    {{- end }}
    {{- if gt (int .values.nodes) 1 }}
    - --nnodes
    - {{ .values.nodes | quote }}
    - --node-rank
    - $(LWS_WORKER_INDEX)
    - --dist-init-addr
    - $(LWS_LEADER_ADDRESS):20000
    {{- end }}
    - --oasis-drain-seconds
    - {{ .values.drainSeconds | quote }}
    {{- if eq .role "prefill" }}
    - --disaggregation-bootstrap-port
    - {{ $v.ports.bootstrap | quote }}
    - --oasis-tier
    - /run/oasis/tier.sock
    {{- else }}
    {{- if .values.kvPoolTokens }}
    - --max-total-tokens
    - {{ .values.kvPoolTokens | int64 | quote }}
    {{- end }}
    - --oasis-host-cache-bytes
    - {{ include "oasis.bytes" .values.hostCache | quote }}
    - --oasis-data-plane
    - {{ $v.transfer.dataPlane }}
    - --oasis-prefill-addresses
    - {{ include "oasis.prefills" .root | quote }}
    {{- include "oasis.keyFlags" (dict "root" .root "prefix" "--oasis-" "plaintext" "--oasis-allow-plaintext=true") | nindent 4 }}
    {{- end }}
    {{- range .values.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  ports:
    - {name: http, containerPort: {{ $v.ports.worker }}}
    {{- if eq .role "prefill" }}
    - {name: bootstrap, containerPort: {{ $v.ports.bootstrap }}}
    {{- end }}
  startupProbe:
    {{- include "oasis.probe" (dict "path" "/health_generate" "port" "http" "timeout" 30 "failures" (div (add .values.startupSeconds 9) 10)) | nindent 4 }}
  readinessProbe:
    {{- include "oasis.probe" (dict "path" "/health" "port" "http" "period" 5) | nindent 4 }}
  livenessProbe:
    {{- include "oasis.probe" (dict "path" "/health" "port" "http" "failures" 6) | nindent 4 }}
  lifecycle:
    preStop: {sleep: {seconds: {{ .values.preStopSeconds }}}}
  {{- include "oasis.workerBody" . | nindent 2 }}
{{- end -}}

{{/* The template of a pod, with the tier as a sidecar where prefill has one. */}}
{{- define "oasis.workerPod" -}}
{{- $v := .root.Values -}}
{{- $prefill := eq .role "prefill" -}}
{{- $sidecar := and $prefill (include "oasis.sidecar" .root) -}}
{{- $tier := merge (include "oasis.tier" .root | fromYaml) (dict "root" .root "path" "tier" "values" $v.tier "images" (list .values.image $v.tier.image) "sidecar" true) -}}
{{- $keys := $v.security.allowPlaintext | ternary "" ($prefill | ternary (empty $sidecar | ternary "" $tier.keys) $v.security.keys.decode) -}}
{{- $role := merge (dict "images" (list .values.image) "keys" ($prefill | ternary "" $keys)) . -}}
{{- $grace := add .values.preStopSeconds .values.drainSeconds 30 -}}
{{- $huge := list (dig "size" "" .values.hugepages) -}}
{{- if $sidecar }}{{ $grace = add $grace $v.tier.drainSeconds 30 }}{{ $huge = append $huge (dig "size" "" $v.tier.hugepages) }}{{ end -}}
{{- $serves := or $sidecar (not $prefill) -}}
{{- $init := list -}}
{{- if and $keys (not $sidecar) }}{{ $init = append $init (include "oasis.keysContainer" $role) }}{{ end -}}
{{- if $v.doctor.enabled -}}
{{- $args := $prefill | ternary (list "--local" "/run/oasis/tier.sock") (list "--host-cache-bytes" (include "oasis.bytes" (default "0" .values.hostCache)) "--data-plane" $v.transfer.dataPlane) -}}
{{- if hasPrefix "/" $v.model.path }}{{ $args = concat $args (list "--model" $v.model.path) }}{{ end -}}
{{- $init = append $init (include "oasis.doctor" (dict "root" .root "images" (list .values.image) "of" .role "args" $args "keys" $role.keys "body" (include "oasis.workerBody" $role))) -}}
{{- end -}}
{{- if $sidecar }}{{ $init = append $init (include "oasis.tierPreparation" $tier) }}{{ $init = append $init (include "oasis.tierContainer" $tier) }}{{ end -}}
metadata:
  {{- $annotations := $prefill | ternary (dict "sglang.ai/bootstrap-port" (toString $v.ports.bootstrap)) dict }}
  {{- include "oasis.podMetadata" (merge (dict "annotations" $annotations) .) | nindent 2 }}
spec:
  {{- include "oasis.podSpec" (merge (dict "grace" $grace "pins" true "data" $serves) .) | nindent 2 }}
  {{- with compact $init }}
  initContainers:
    {{- range . }}
    {{- trim . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    {{- include "oasis.workerContainer" $role | nindent 4 }}
  volumes:
    {{- include "oasis.volumes" (dict "root" .root "shm" .values.shmSize "socket" $prefill "hostPath" (and $prefill (empty $sidecar) | ternary $v.tier.daemonset.hostPath "") "keys" $keys "huge" $huge) | nindent 4 }}
    {{- with $v.model.volume }}
    - {{ merge (dict "name" "model") . | toYaml | nindent 6 | trim }}
    {{- end }}
{{- end -}}
