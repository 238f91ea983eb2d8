{{/* A tier, in whichever pod, and a memory node, which is the same program. Both are given "path" and "values" (the section), "images" and "keys" (a secret's name). */}}

{{- define "oasis.tierBody" -}}
env:
  {{- include "oasis.env" (dict "root" .root "ucx" true "env" .values.extraEnv) | nindent 2 }}
{{ include "oasis.restricted" (dict "root" .root "pins" true) }}
{{ include "oasis.resources" (dict "path" .path "memory" (list .values.baseMemory .values.arena) "resources" .values.resources
     "extra" (include "oasis.devices" (dict "root" .root "values" .values "rdma" true) | fromYaml)) }}
volumeMounts:
  {{- include "oasis.mounts" (dict "socket" true "keys" .keys "hugepages" .values.hugepages) | nindent 2 }}
{{- end -}}

{{- define "oasis.tierContainer" -}}
- name: tier
  {{- include "oasis.image" . | nindent 2 }}
  {{- if .sidecar }}
  restartPolicy: Always
  {{- end }}
  args:
    - tier
    - --local
    - /run/oasis/tier.sock
    - --listen
    - $(POD_IP):{{ .root.Values.ports.control }}
    - --http
    - 0.0.0.0:{{ .root.Values.ports.tierHttp }}
    - --arena-bytes
    - {{ include "oasis.bytes" .values.arena | quote }}
    - --data-plane
    - {{ .root.Values.transfer.dataPlane }}
    - --drain-seconds
    - {{ .values.drainSeconds | quote }}
    {{- include "oasis.keyFlags" (dict "root" .root "prefix" "--" "plaintext" "--allow-plaintext") | nindent 4 }}
    {{- if .memoryNodes }}
    - --memory-nodes
    - {{ .memoryNodes | quote }}
    {{- end }}
    {{- if .root.Values.tier.acceptGenerated }}
    - --accept-generated
    {{- end }}
    {{- if .root.Values.tier.zeroFreed }}
    - --zero-freed
    {{- end }}
    {{- range .values.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  ports:
    - {name: control, containerPort: {{ .root.Values.ports.control }}}
    - {name: tier-http, containerPort: {{ .root.Values.ports.tierHttp }}}
  startupProbe:
    {{- include "oasis.probe" (dict "path" "/healthz" "port" "tier-http" "period" 2 "failures" (div (add .values.startupSeconds 1) 2)) | nindent 4 }}
  readinessProbe:
    {{- include "oasis.probe" (dict "path" "/readyz" "port" "tier-http" "period" 5) | nindent 4 }}
  livenessProbe:
    {{- include "oasis.probe" (dict "path" "/healthz" "port" "tier-http" "failures" 6) | nindent 4 }}
  {{- include "oasis.tierBody" . | nindent 2 }}
{{- end -}}

{{/* What runs before a tier. */}}
{{- define "oasis.tierPreparation" -}}
{{- if .keys }}
{{ include "oasis.keysContainer" . }}
{{- end }}
{{- if .root.Values.doctor.enabled }}
{{- $args := list "--local" "/run/oasis/tier.sock" "--arena-bytes" (include "oasis.bytes" .values.arena) "--data-plane" .root.Values.transfer.dataPlane }}
{{ include "oasis.doctor" (dict "root" .root "images" .images "of" "tier" "args" $args "keys" .keys "body" (include "oasis.tierBody" .)) }}
{{- end }}
{{- end -}}

{{/* The tier of a prefill pod or host, as the two above want it. */}}
{{- define "oasis.tier" -}}
{{- $v := .Values -}}
{{- $nodes := "" -}}
{{- if eq $v.tier.mode "memoryNode" -}}
{{- $mark := $v.security.allowPlaintext | ternary "" (printf "#%s" $v.security.memoryNodeKey) -}}
{{- $nodes = printf "dns://%s.%s.svc:%d%s" (include "oasis.name" (dict "root" . "role" "memory")) .Release.Namespace (int $v.ports.control) $mark -}}
{{- end -}}
{{- dict "keys" ($v.security.allowPlaintext | ternary "" $v.security.keys.tier) "memoryNodes" $nodes | toYaml -}}
{{- end -}}

{{/* The template of a pod of its own. "pod": what it is as a role, "tier": what runs in it. */}}
{{- define "oasis.tierPod" -}}
{{- $v := .tier.values -}}
metadata:
  {{- include "oasis.podMetadata" .pod | nindent 2 }}
spec:
  {{- include "oasis.podSpec" (merge (dict "grace" (add $v.drainSeconds 30) "pins" true "data" true) .pod) | nindent 2 }}
  {{- $init := include "oasis.tierPreparation" .tier | trim }}
  {{- if or $init .pod.hostPath }}
  initContainers:
    {{- if and .pod.hostPath .pod.values.prepare }}
    {{- include "oasis.hostPathContainer" .tier | nindent 4 }}
    {{- end }}
    {{- with $init }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    {{- include "oasis.tierContainer" .tier | nindent 4 }}
  volumes:
    {{- include "oasis.volumes" (dict "root" .tier.root "socket" true "hostPath" .pod.hostPath "keys" .tier.keys "huge" (list (dig "size" "" $v.hugepages))) | nindent 4 }}
{{- end -}}

{{/* The kubelet makes a host's folder for user 0. */}}
{{- define "oasis.hostPathContainer" -}}
{{- $user := include "oasis.pins" .root | empty | ternary (.root.Values.security.runAsUser | int64) (int64 0) -}}
- name: host-path
  {{- include "oasis.image" . | nindent 2 }}
  command: [chown, "{{ $user }}:{{ $user }}", /run/oasis]
  securityContext:
    runAsUser: 0
    runAsNonRoot: false
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      add: [CHOWN]
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {memory: 32Mi}
  volumeMounts:
    - {name: socket, mountPath: /run/oasis}
{{- end -}}
