{{- /* Peers: the pods of a component of this release. Takes root and component. */ -}}
{{- define "baton.peer" -}}
- podSelector:
    matchLabels: {{- include "baton.selectorLabels" . | nindent 6 }}
{{- end -}}

{{- /* Peers that values name, as a list; nothing where there are none, which is everybody. Takes peers. */ -}}
{{- define "baton.peers" -}}
{{- range $_, $peer := .peers }}
- {{- toYaml $peer | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "baton.ports" -}}
{{- range . }}
- {protocol: TCP, port: {{ . }}}
{{- end }}
{{- end -}}

{{- /* What all pods of models may call: names, Redis, the hub while a model is pulled, and what values add. */ -}}
{{- define "baton.commonEgress" -}}
- to: [{namespaceSelector: {}}]
  ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]
{{- if .Values.redis.bundled.enabled }}
- to: {{- include "baton.peer" (dict "root" . "component" "redis") | nindent 4 }}
  ports: [{protocol: TCP, port: 6379}]
{{- else }}
{{- /* Its port, of redis://host:port/db. */}}
- ports: [{protocol: TCP, port: {{ regexFind ":[0-9]+(/|$)" .Values.redis.external.url | trimAll ":/" | default "6379" }}}]
{{- end }}
{{- if eq .Values.model.volume.kind "pull" }}
- ports: [{protocol: TCP, port: 443}]
  {{- with .Values.networkPolicy.hub }}
  to: {{- include "baton.peers" (dict "peers" .) | nindent 4 }}
  {{- end }}
{{- end }}
{{- with .Values.networkPolicy.egress }}
- to: {{- include "baton.peers" (dict "peers" .) | nindent 4 }}
{{- end }}
{{- end -}}

{{- /* Between the two that move KV: the workers' port, and with NIXL whatever ports UCX takes. */ -}}
{{- define "baton.kvPorts" -}}
{{- if ne (.Values.settings.prefill.kv_transport | default "") "nixl" }}
ports: [{protocol: TCP, port: 50060}]
{{- end }}
{{- end -}}
