{{/* What pods and containers of all roles have in common. */}}

{{/* A pod's spec but for containers and volumes. "grace": seconds; "pins": whether it registers memory for RDMA; "data": whether it
serves data planes; "tokened": whether it may talk to the Kubernetes API. */}}
{{- define "oasis.podSpec" -}}
{{- $user := and .pins (include "oasis.pins" .root) | empty | ternary (.root.Values.security.runAsUser | int64) (int64 0) -}}
serviceAccountName: {{ include "oasis.fullname" .root }}{{ empty .tokened | ternary "" "-router" }}
automountServiceAccountToken: {{ default false .tokened }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  runAsNonRoot: {{ ne $user (int64 0) }}
  runAsUser: {{ $user }}
  runAsGroup: {{ $user }}
  fsGroup: {{ .root.Values.security.fsGroup | int64 }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
  {{- if .data }}
  sysctls:
    - name: net.ipv4.ip_local_port_range
      value: "{{ .root.Values.transfer.dataPorts.from }} {{ .root.Values.transfer.dataPorts.to }}"
  {{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- with get $.values $field }}
{{ dict $field . | toYaml }}
{{- end }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
{{ dict "imagePullSecrets" . | toYaml }}
{{- end }}
{{- if ne .role "tier" }}
topologySpreadConstraints:
  {{- with .values.topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "oasis.selector" . | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* No labels with versions: pods restart when something of theirs changes, and not with each chart. */}}
{{- define "oasis.podMetadata" -}}
labels:
  {{- include "oasis.selector" . | nindent 2 }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge dict (.annotations | default dict) .values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* "pins": whether the container registers memory for RDMA. */}}
{{- define "oasis.restricted" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- if and .pins (include "oasis.pins" .root) }}
    add: [IPC_LOCK]
    {{- end }}
{{- end -}}

{{/* "env": the user's, which wins. Nothing is named twice: Helm 4 applies on the server, which refuses that. */}}
{{- define "oasis.env" -}}
{{- $names := list -}}
{{- range .env }}{{ $names = append $names .name }}{{ end -}}
{{- $all := list -}}
{{- range include "oasis.ownEnv" . | fromYamlArray }}{{ if not (has .name $names) }}{{ $all = append $all . }}{{ end }}{{ end -}}
{{- concat $all (.env | default list) | toYaml -}}
{{- end -}}

{{/* "ucx": whether the process transfers; "more": further ones, as YAML. */}}
{{- define "oasis.ownEnv" -}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: HOME, value: /cache}
- {name: USER, value: oasis}
{{- if .ucx }}
{{- with .root.Values.transfer.ucx.netDevices }}
- {name: UCX_NET_DEVICES, value: {{ . | quote }}}
{{- end }}
{{- with .root.Values.transfer.ucx.tls | default (empty .root.Values.transfer.rdma.resource | ternary "tcp" "") }}
- {name: UCX_TLS, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- with .more }}
{{ . }}
{{- end }}
{{- end -}}

{{/* Resources that Kubernetes hands out whole, as a dict: huge pages, RDMA devices, GPUs. */}}
{{- define "oasis.devices" -}}
{{- $found := dict -}}
{{- with .values.hugepages }}{{ if .amount }}{{ $_ := set $found (printf "hugepages-%s" .size) .amount }}{{ end }}{{ end -}}
{{- with .root.Values.transfer.rdma }}{{ if and $.rdma .resource }}{{ $_ := set $found .resource .count }}{{ end }}{{ end -}}
{{- if and .gpus .root.Values.gpuResource }}{{ $_ := set $found .root.Values.gpuResource .gpus }}{{ end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* An HTTP probe. */}}
{{- define "oasis.probe" -}}
httpGet: {path: {{ .path }}, port: {{ .port }}}
periodSeconds: {{ .period | default 10 }}
timeoutSeconds: {{ .timeout | default 10 }}
failureThreshold: {{ .failures | default 3 }}
{{- end -}}

{{/* Writable places of a container. */}}
{{- define "oasis.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- if .shm }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- with .hugepages }}{{ if .amount }}
- {name: hugepages-{{ lower .size }}, mountPath: /dev/hugepages}
{{- end }}{{ end }}
{{- if .socket }}
- {name: socket, mountPath: /run/oasis}
{{- end }}
{{- if .keys }}
- {name: keys, mountPath: /etc/oasis/keys, readOnly: true}
- {name: own-key, mountPath: /run/oasis-key, readOnly: true}
{{- end }}
{{- end -}}

{{/* Their volumes. "huge": sizes of huge pages; "keys": a secret's name; "hostPath": folder of a socket that pods share. */}}
{{- define "oasis.volumes" -}}
- {name: tmp, emptyDir: {}}
- {name: cache, emptyDir: {}}
{{- with .shm }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ . }}}}
{{- end }}
{{- range default list .huge | uniq | compact }}
- {name: hugepages-{{ lower . }}, emptyDir: {medium: HugePages-{{ . }}}}
{{- end }}
{{- if .hostPath }}
- {name: socket, hostPath: {path: {{ .hostPath }}, type: {{ .root.Values.tier.daemonset.prepare | ternary "DirectoryOrCreate" "Directory" }}}}
{{- else if .socket }}
- {name: socket, emptyDir: {}}
{{- end }}
{{- with .keys }}
- {name: keys, secret: {secretName: {{ . }}, defaultMode: 0400}}
- {name: own-key, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
{{- end }}
{{- end -}}

{{/* The kubelet opens mounted secrets to the group of volumes, and a key that anybody but its owner may read is refused: its owner copies
it. A new key needs a restart in any case; lists of trusted keys are read where they are mounted, and followed. */}}
{{- define "oasis.keysContainer" -}}
- name: keys
  {{- include "oasis.image" . | nindent 2 }}
  command: [install, -m, "0400", /etc/oasis/keys/node.key_secret, /run/oasis-key/node.key_secret]
  {{- include "oasis.restricted" . | nindent 2 }}
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {memory: 32Mi}
  volumeMounts:
    - {name: keys, mountPath: /etc/oasis/keys, readOnly: true}
    - {name: own-key, mountPath: /run/oasis-key}
{{- end -}}

{{/* Flags: who a node is and whom it trusts. "prefix" of them; "plaintext": the flag without keys. */}}
{{- define "oasis.keyFlags" -}}
{{- if .root.Values.security.allowPlaintext }}
- {{ .plaintext }}
{{- else }}
- {{ .prefix }}keys
- /run/oasis-key/node.key_secret
- {{ .prefix }}allowed
- /etc/oasis/keys
{{- end }}
{{- end -}}

{{/* `oasis doctor` in the place of a container that has "body". "keys": whether it has any. */}}
{{- define "oasis.doctor" -}}
- name: doctor-{{ .of }}
  {{- include "oasis.image" . | nindent 2 }}
  args:
    - doctor
    - --role
    - {{ .of }}
    {{- range .args }}
    - {{ . | quote }}
    {{- end }}
    {{- if .keys }}
    {{- include "oasis.keyFlags" (dict "root" .root "prefix" "--") | nindent 4 }}
    {{- end }}
    - --json
  {{- .body | nindent 2 }}
{{- end -}}
