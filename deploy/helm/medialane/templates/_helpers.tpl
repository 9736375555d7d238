{{- define "medialane.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "medialane.selector" -}}
app.kubernetes.io/name: medialane
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "medialane.labels" -}}
{{ include "medialane.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "medialane.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Components of workers: with some that only compute prompts, the others generate. */}}
{{- define "medialane.pools" -}}
worker{{ if gt (int .Values.prefill.replicas) 0 }} prefill{{ end }}
{{- end }}

{{- define "medialane.rpcSecret" -}}
{{- .Values.rpc.secretName | default (printf "%s-rpc" (include "medialane.name" .)) -}}
{{- end }}

{{- define "medialane.apiKeysSecret" -}}
{{- $made := ternary (printf "%s-api-keys" (include "medialane.name" .)) "" (default false .Values.gateway.createApiKey) -}}
{{- .Values.gateway.apiKeysSecret | default $made -}}
{{- end }}

{{/* Flags of secret and certificates, the same for all processes. */}}
{{- define "medialane.rpcFlags" -}}
- --rpc-secret-file=/etc/medialane/secret
- --rpc-tls-cert=/etc/medialane/cert.pem
- --rpc-tls-key=/etc/medialane/key.pem
- --rpc-tls-ca=/etc/medialane/ca.pem
- --drain-timeout={{ .Values.drainTimeoutSeconds }}
{{- end }}

{{/* What all containers have: image, rights, volumes. */}}
{{- define "medialane.container" -}}
image: {{ include "medialane.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: shm, mountPath: /dev/shm}
  - {name: run, mountPath: /run/medialane}
  - {name: cache, mountPath: /home/medialane}
  - {name: rpc-secret, mountPath: /etc/medialane, readOnly: true}
  {{- if .Values.model.claim }}
  - {name: models, mountPath: /models, readOnly: true}
  {{- end }}
{{- end }}

{{- define "medialane.env" -}}
- {name: HOME, value: /home/medialane}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- with .Values.model.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
{{- end }}
{{- end }}

{{/* (dict "root" $ "role" values-of-the-pod "gib" N "flags" list "preStop" N "resources" map) */}}
{{- define "medialane.store" -}}
- name: store
  {{- include "medialane.container" .root | nindent 2 }}
  args:
    - store
    - {{ .root.Values.model.path }}
    - --listen=unix:/run/medialane/store.sock
    {{- include "medialane.rpcFlags" .root | nindent 4 }}
    - --arena-size={{ .gib }}GiB
    {{- range .flags }}
    - {{ . | quote }}
    {{- end }}
    - --
    {{- range .root.Values.model.flags }}
    - {{ . | quote }}
    {{- end }}
  env: {{- include "medialane.env" .root | nindent 4 }}
  {{- if .peer }}
  ports:
    - {name: peer, containerPort: 7200}
  {{- end }}
  # A store that reports a problem is not ready (status 1); one that does not answer is restarted (status 2).
  startupProbe:
    exec: {command: [sh, -c, "medialane status --store unix:/run/medialane/store.sock; [ $? -lt 2 ]"]}
    periodSeconds: 5
    timeoutSeconds: 10
    failureThreshold: 60
  livenessProbe:
    exec: {command: [sh, -c, "medialane status --store unix:/run/medialane/store.sock; [ $? -lt 2 ]"]}
    periodSeconds: 20
    timeoutSeconds: 10
    failureThreshold: 3
  readinessProbe:
    exec: {command: [medialane, status, --store, "unix:/run/medialane/store.sock"]}
    periodSeconds: 20
    timeoutSeconds: 10
  lifecycle:  # until the others of the pod have drained
    preStop: {exec: {command: [sleep, {{ .preStop | quote }}]}}
  resources: {{- toYaml .resources | nindent 4 }}
{{- end }}

{{/* (dict "root" $ "name" NAME "flags" list "role" worker|encoder "index" of the metrics port) */}}
{{- define "medialane.engine" -}}
- name: {{ .name }}
  {{- include "medialane.container" .root | nindent 2 }}
  args:
    - worker
    - {{ .root.Values.model.path }}
    - --store=unix:/run/medialane/store.sock
    - --worker-name=$(POD_NAME)/{{ .index }}
    - --metrics-host=0.0.0.0
    - --metrics-port={{ add 8001 .index }}
    {{- include "medialane.rpcFlags" .root | nindent 4 }}
    {{- range .flags }}
    - {{ . | quote }}
    {{- end }}
    - --
    {{- range .root.Values.model.flags }}
    - {{ . | quote }}
    {{- end }}
  env: {{- include "medialane.env" .root | nindent 4 }}
  ports:
    - {name: metrics-{{ .index }}, containerPort: {{ add 8001 .index }}}
  startupProbe:  # while the model is loaded
    httpGet: {path: /live, port: metrics-{{ .index }}}
    periodSeconds: 10
    failureThreshold: {{ div .root.Values.engine.startupSeconds 10 }}
  livenessProbe:
    httpGet: {path: /live, port: metrics-{{ .index }}}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 12
  readinessProbe:
    httpGet: {path: /ready, port: metrics-{{ .index }}}
    periodSeconds: 2
    timeoutSeconds: 2
  {{- $engine := .root.Values.engine }}
  {{- $gpus := ternary (dict $engine.gpuResource (toString $engine.gpus)) dict (gt (int $engine.gpus) 0) }}
  resources:
    requests: {{- toYaml (merge (dict) $gpus ($engine.resources.requests | default dict)) | nindent 6 }}
    limits: {{- toYaml (merge (dict) $gpus ($engine.resources.limits | default dict)) | nindent 6 }}
{{- end }}

{{/* (dict "root" $ "component" NAME "labels" map): labels and annotations of a pod. */}}
{{- define "medialane.podMetadata" -}}
labels:
  {{- include "medialane.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  llm-d.ai/model: {{ .root.Values.model.servedName }}
  model.aibrix.ai/engine: vllm
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .root.Values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* (dict "root" $ "place" values with nodeSelector etc. "gib" N "grace" seconds): a pod without its containers. */}}
{{- define "medialane.pod" -}}
# The store frees what a process holds when that process has exited: it must see the others' process ids.
shareProcessNamespace: true
automountServiceAccountToken: false
# Of a Service `medialane` the variables are MEDIALANE_PORT=tcp://... and others, which are no settings.
enableServiceLinks: false
securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
terminationGracePeriodSeconds: {{ .grace }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .place.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ add .gib 1 }}Gi}
  - name: run
    emptyDir: {}
  - name: cache
    emptyDir: {}
  - name: rpc-secret
    secret: {secretName: {{ include "medialane.rpcSecret" .root }}, defaultMode: 0440}
  {{- if .root.Values.model.claim }}
  - name: models
    persistentVolumeClaim: {claimName: {{ .root.Values.model.claim }}, readOnly: true}
  {{- end }}
{{- end }}
