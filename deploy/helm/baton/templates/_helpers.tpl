{{- /* Names, labels, and what the pods of several roles have in common. */ -}}

{{- define "baton.name" -}}
{{ .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}

{{- define "baton.fullname" -}}
{{- $name := include "baton.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{ .Values.fullnameOverride | default $full | trunc 40 | trimSuffix "-" }}
{{- end -}}

{{- /* Never what changes from version to version: selectors are for ever. And not app.kubernetes.io/name, by which
      KubeRay finds its pods. Takes root and component. */ -}}
{{- define "baton.selectorLabels" -}}
app.kubernetes.io/part-of: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "baton.podLabels" -}}
{{ include "baton.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "baton.labels" -}}
app.kubernetes.io/name: {{ include "baton.name" .root }}
{{ include "baton.podLabels" . }}
{{- end -}}

{{- /* Metadata of an object: root and component, and perhaps a suffix of the name, labels and annotations. */ -}}
{{- define "baton.metadata" -}}
name: {{ include "baton.fullname" .root }}{{ with .suffix }}-{{ . }}{{ end }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
  {{- with .labels }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "baton.image" -}}
{{- $image := .image -}}
{{- $registry := .root.Values.global.imageRegistry | default $image.registry -}}
{{- with $registry | default "" | trimSuffix "/" }}{{ . }}/{{ end }}{{ $image.repository -}}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end -}}

{{- define "baton.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "baton.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{- /* Grace of a pod: its drain, its preStop, and 15 s to leave the registry and close; a pool 25 s more. */ -}}
{{- define "baton.graceSeconds" -}}
{{ add (int .drainSeconds) (int (.preStopSeconds | default 0)) 15 (int (.extra | default 0)) }}
{{- end -}}

{{- /* Password and authorities are files, which the URL names. */ -}}
{{- define "baton.redisUrl" -}}
{{- $own := printf "redis://baton@%s-redis:6379/0" (include "baton.fullname" .) -}}
{{- $files := list -}}
{{- if include "baton.hasRedisPassword" . }}{{ $files = append $files "password_file=/etc/baton/redis/password" }}{{ end -}}
{{- if .Values.redis.external.ca }}{{ $files = append $files "ssl_ca_certs=/etc/baton/redis/ca.crt" }}{{ end -}}
{{ ternary $own .Values.redis.external.url .Values.redis.bundled.enabled }}{{ with $files }}?{{ join "&" . }}{{ end }}
{{- end -}}

{{- define "baton.redisSecret" -}}
{{ .Values.redis.existingSecret | default (printf "%s-redis" (include "baton.fullname" .)) }}
{{- end -}}

{{- define "baton.hasRedisPassword" -}}
{{- if or .Values.redis.bundled.enabled .Values.redis.existingSecret }}true{{ end -}}
{{- end -}}

{{- define "baton.tlsSecret" -}}
{{ .Values.tls.secret | default (printf "%s-tls" (include "baton.fullname" .)) }}
{{- end -}}

{{- define "baton.raySecret" -}}
{{ include "baton.fullname" . }}-ray
{{- end -}}

{{- define "baton.modelPath" -}}
{{- if eq .Values.model.volume.kind "pull" -}}
{{ .Values.model.name }}
{{- else -}}
/models/{{ .Values.model.name }}
{{- end -}}
{{- end -}}

{{- /* A table of TOML from a map of strings, numbers, booleans and lists of them. Helm reads every number as a
      float; a whole one is written as an integer, which the settings take for both. */ -}}
{{- define "baton.toml" -}}
{{- range $key, $value := . }}
{{ $key }} = {{ if and (kindIs "float64" $value) (eq (floor $value) $value) }}{{ int64 $value }}{{ else }}{{ toRawJson $value }}{{ end }}
{{- end }}
{{- end -}}

{{- /* Settings of every role. */ -}}
{{- define "baton.commonSettings" -}}
model: {{ include "baton.modelPath" . }}
namespace: {{ include "baton.fullname" . }}
redis_url: {{ include "baton.redisUrl" . }}
{{ include "baton.tlsSettings" . }}
{{- end -}}

{{- define "baton.tlsSettings" -}}
{{- if .Values.tls.enabled }}
tls_cert: /etc/baton/tls/tls.crt
tls_key: /etc/baton/tls/tls.key
tls_ca: /etc/baton/tls/ca.crt
tls_server_name: {{ .Values.tls.serverName }}
{{- end }}
{{- end -}}

{{- /* Pods are renewed when the settings change, which they read at their start. Of Secrets the chart knows
      the names only: certificates and passwords are read again without a restart, tenants at a restart. */ -}}
{{- define "baton.checksums" -}}
checksum/config: {{ include (print $.Template.BasePath "/configmap.yaml") . | sha256sum }}
{{- end -}}

{{- /* Environment of a container, of which `own` is a map of the role's variables and `extra` of the user's. */ -}}
{{- define "baton.env" -}}
- name: BATON_CONFIG
  value: /etc/baton/config/baton.toml
- name: BATON_CACHE_DIR
  value: /var/cache/baton
- name: HOME
  value: /tmp
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
# What the commands of `baton` ask in this pod.
- name: BATON_ADMIN_ADDRESS
  value: $(POD_IP):50052
- name: BATON_CONTROL_ADDRESS
  value: $(POD_IP):50053
{{- if .root.Values.tls.enabled }}
- name: BATON_TLS_CA
  value: /etc/baton/tls/ca.crt
- name: BATON_TLS_CERT
  value: /etc/baton/tls/tls.crt
- name: BATON_TLS_KEY
  value: /etc/baton/tls/tls.key
- name: BATON_TLS_SERVER_NAME
  value: {{ .root.Values.tls.serverName }}
{{- end }}
{{- range $name, $value := .own }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- include "baton.extraEnv" .extra }}
{{- end -}}

{{- /* Variables of the user by name: a value, or what says where it comes from, as valueFrom. Helm reads numbers as floats. */ -}}
{{- define "baton.extraEnv" -}}
{{- range $name, $value := . }}
- name: {{ $name | quote }}
  {{- if kindIs "map" $value }}
  {{- toYaml $value | nindent 2 }}
  {{- else if and (kindIs "float64" $value) (eq (floor $value) $value) }}
  value: {{ int64 $value | quote }}
  {{- else }}
  value: {{ $value | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "baton.volumeMounts" -}}
- {name: config, mountPath: /etc/baton/config, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/baton}
{{- if include "baton.hasRedisPassword" . }}
- {name: redis, mountPath: /etc/baton/redis, readOnly: true}
{{- end }}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/baton/tls, readOnly: true}
{{- end }}
{{- if ne .Values.model.volume.kind "pull" }}
- {name: model, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{- define "baton.volumes" -}}
- {name: config, configMap: {name: {{ include "baton.fullname" . }}}}
- {name: tmp, emptyDir: {}}
- name: cache
  emptyDir:
    {{- if eq .Values.model.volume.kind "pull" }}
    sizeLimit: {{ .Values.model.volume.sizeLimit }}
    {{- else }}
    sizeLimit: 10Gi
    {{- end }}
{{- if include "baton.hasRedisPassword" . }}
- name: redis
  secret:
    secretName: {{ include "baton.redisSecret" . }}
    defaultMode: 0440
    items:
      - {key: {{ .Values.redis.passwordKey }}, path: password}
      {{- with .Values.redis.external.ca }}
      - {key: {{ . }}, path: ca.crt}
      {{- end }}
{{- end }}
{{- if .Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "baton.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- if eq .Values.model.volume.kind "claim" }}
- name: model
  persistentVolumeClaim: {claimName: {{ .Values.model.volume.claim }}, readOnly: true}
{{- else if eq .Values.model.volume.kind "hostPath" }}
- name: model
  hostPath: {path: {{ .Values.model.volume.hostPath }}, type: Directory}
{{- end }}
{{- end -}}

{{- /* Image of a decode group as YAML: what it says over image.worker, of which a digest ends with a tag of its own. */ -}}
{{- define "baton.groupImage" -}}
{{- $own := .role.image | default dict -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image.worker) $own -}}
{{- if and $own.tag (not $own.digest) }}{{ $_ := set $image "digest" "" }}{{ end -}}
{{ toYaml $image }}
{{- end -}}

{{- /* Brings the model into the cache of the pod, with the workers' image, which can convert. Takes root and the role's
      values. A device is not needed for it, nor counted twice: of resources it has CPU and memory. */ -}}
{{- define "baton.pull" -}}
{{- $values := .root.Values -}}
{{- if eq $values.model.volume.kind "pull" }}
initContainers:
  - name: pull
    image: {{ include "baton.image" (dict "root" .root "image" (include "baton.groupImage" . | fromYaml)) }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    command: [baton, pull, {{ $values.model.name | quote }}]
    env:
      - {name: BATON_CACHE_DIR, value: /var/cache/baton}
      - {name: HOME, value: /tmp}
      - {name: NVIDIA_VISIBLE_DEVICES, value: void}
      {{- with $values.model.tokenSecret }}
      - name: HF_TOKEN
        valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
      {{- end }}
      {{- include "baton.extraEnv" .role.extraEnv | nindent 6 }}
    resources:
      {{- range $kind, $amounts := .role.resources }}
      {{ $kind }}: {{- toYaml (pick $amounts "cpu" "memory" "ephemeral-storage") | nindent 8 }}
      {{- end }}
    securityContext: {{- toYaml $values.containerSecurityContext | nindent 6 }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: cache, mountPath: /var/cache/baton}
{{- end }}
{{- end -}}

{{- /* Of a pod: takes root and the role's values. asksKubernetes: Ray's autoscaler does, with the account that KubeRay's
      operator makes for it. */ -}}
{{- define "baton.podSettings" -}}
{{- if not .asksKubernetes }}
serviceAccountName: {{ include "baton.serviceAccountName" .root }}
automountServiceAccountToken: false
{{- end }}
enableServiceLinks: false
securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- if .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range $name, $_ := .root.Values.image.pullSecrets }}
  - {name: {{ $name }}}
  {{- end }}
{{- end }}
{{- with .role.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .role.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .role.tolerations }}
tolerations:
  {{- range $_, $toleration := . }}
  - {{- toYaml $toleration | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "baton.topologySpread" -}}
{{- with .role.topologySpread }}
topologySpreadConstraints:
  {{- range $key, $spread := . }}
  - topologyKey: {{ $key }}
    maxSkew: {{ $spread.maxSkew | default 1 }}
    whenUnsatisfiable: {{ $spread.whenUnsatisfiable | default "ScheduleAnyway" }}
    labelSelector:
      matchLabels: {{- include "baton.selectorLabels" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* Probes of a process, at its port for them: kubelet speaks no TLS. */ -}}
{{- define "baton.probes" -}}
{{- if not .root.Values.diagnosticMode }}
startupProbe:
  grpc: {port: {{ .port }}, service: liveness}
  periodSeconds: 5
  failureThreshold: {{ .startFailures | default 240 }}
readinessProbe:
  grpc: {port: {{ .port }}, service: readiness}
  periodSeconds: 2
  timeoutSeconds: 2
livenessProbe:
  grpc: {port: {{ .port }}, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 3
  failureThreshold: 3
{{- end }}
{{- end -}}

{{- define "baton.command" -}}
{{- if .root.Values.diagnosticMode }}
command: [sleep, infinity]
{{- else }}
command: {{ toJson .command }}
{{- end }}
{{- end -}}

{{- /* What Baton asks of Redis: its own keys, no scripts, nothing of an administrator. Ray's user exists with its fault
      tolerance only. */ -}}
{{- define "baton.redisAcl" -}}
user default off
user baton on #$digest resetkeys ~{{ include "baton.fullname" . }}:* resetchannels +@read +@write +@connection +@transaction +info +scan -@dangerous +info +role -@scripting -@blocking
{{- if .Values.decode.ray.gcsFaultTolerance.enabled }}
user ray on #$digest allkeys allchannels +@all -@admin
{{- end }}
{{- end -}}
