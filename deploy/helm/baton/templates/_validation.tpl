{{- /* What a schema cannot say: values that need each other. Each message names the key and what to do. */ -}}
{{- define "baton.validate" -}}
{{- $model := .Values.model.volume -}}
{{- if and (eq $model.kind "claim") (not $model.claim) -}}
{{ fail "model.volume.claim is empty; name the PersistentVolumeClaim with the model, or choose another model.volume.kind" }}
{{- end -}}
{{- if and (eq $model.kind "hostPath") (not $model.hostPath) -}}
{{ fail "model.volume.hostPath is empty; name the nodes' folder with the model, or choose another model.volume.kind" }}
{{- end -}}
{{- if and (not .Values.redis.bundled.enabled) (not .Values.redis.external.url) -}}
{{ fail "redis.external.url is empty and redis.bundled.enabled is false; give one of them" }}
{{- end -}}
{{- if regexMatch "://[^/@]*:[^/@]+@" .Values.redis.external.url -}}
{{ fail "redis.external.url holds a password, which a ConfigMap would show; put it into the Secret redis.existingSecret" }}
{{- end -}}
{{- if contains "?" .Values.redis.external.url -}}
{{ fail "redis.external.url has parameters; the chart adds its own: name authorities in redis.external.ca" }}
{{- end -}}
{{- range $name, $group := .Values.decode.groups -}}
{{- range $key := list "replicas" "min" "max" "shm" "resources" -}}
{{- if and $group (not (hasKey $group $key)) -}}
{{ fail (printf "decode.groups.%s.%s is missing; only the group main has defaults, another one names replicas, min, max, shm and resources" $name $key) }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not (hasKey .Values.decode.groups .Values.decode.serving) -}}
{{ fail (printf "decode.serving is %q, which decode.groups does not have; it has %s" .Values.decode.serving (keys .Values.decode.groups | sortAlpha | join ", ")) }}
{{- end -}}
{{- if not (index .Values.decode.groups .Values.decode.serving).replicas -}}
{{ fail (printf "decode.groups.%s.replicas is 0, and decode.serving names that group; somebody has to decode" .Values.decode.serving) }}
{{- end -}}
{{- range $name, $group := .Values.decode.groups -}}
{{- if and $group (hasPrefix "cuda" $.Values.decode.device) (not (regexMatch "gpu" (toJson $group.resources))) -}}
{{ fail (printf "decode.device is %s, and decode.groups.%s.resources names no GPU; ask for one, as nvidia.com/gpu: 1 in requests and limits" $.Values.decode.device $name) }}
{{- end -}}
{{- if not $group -}}
{{- else if or (lt (int $group.max) (int $group.replicas)) (gt (int $group.min) (int $group.replicas)) -}}
{{ fail (printf "decode.groups.%s.replicas is %d; it must lie between min (%d) and max (%d)" $name (int $group.replicas) (int $group.min) (int $group.max)) }}
{{- end -}}
{{- end -}}
{{- if and .Values.tls.enabled (not .Values.tls.secret) (not .Values.tls.certManager.enabled) -}}
{{ fail "tls.enabled is true; name the Secret in tls.secret, or set tls.certManager.enabled" }}
{{- end -}}
{{- if and .Values.tls.secret (not .Values.tls.enabled) -}}
{{ fail "tls.secret is set and tls.enabled is false; nobody would use the certificate, and all connections would be plain text" }}
{{- end -}}
{{- if and .Values.prefill.replicas (hasPrefix "cuda" .Values.prefill.device) (not (regexMatch "gpu" (toJson .Values.prefill.resources))) -}}
{{ fail (printf "prefill.device is %s, and prefill.resources names no GPU; ask for one, as nvidia.com/gpu: 1 in requests and limits" .Values.prefill.device) }}
{{- end -}}
{{- $monitoring := and .Values.networkPolicy.enabled (not .Values.networkPolicy.monitoring) -}}
{{- if and $monitoring .Values.metrics.podMonitor.enabled -}}
{{ fail "metrics.podMonitor.enabled is true and networkPolicy.monitoring is empty: Ray's pods would let nobody read; name Prometheus there" }}
{{- end -}}
{{- if and $monitoring .Values.metrics.serviceMonitor.enabled .Values.networkPolicy.clients -}}
{{ fail "metrics.serviceMonitor.enabled is true, and networkPolicy lets only its clients in; name Prometheus in networkPolicy.monitoring" }}
{{- end -}}
{{- if and .Values.metrics.prometheusRule.enabled (not .Values.metrics.serviceMonitor.enabled) -}}
{{ fail "metrics.prometheusRule.enabled is true and metrics.serviceMonitor.enabled is false: Prometheus would not know the routers, and BatonRouterDown would fire for ever" }}
{{- end -}}
{{- $envs := dict "router" .Values.router.extraEnv "prefill" .Values.prefill.extraEnv -}}
{{- range $name, $group := .Values.decode.groups -}}
{{- with $group }}{{ $_ := set $envs (printf "decode.groups.%s" $name) (.extraEnv | default dict) }}{{ end -}}
{{- end -}}
{{- range $where, $env := $envs -}}
{{- range $name, $_ := $env -}}
{{- if regexMatch "^(HOME|POD_IP|POD_NAME|NVIDIA_VISIBLE_DEVICES|RAY_AUTH_.*|BATON_(CONFIG|CACHE_DIR|(ADMIN|CONTROL)_ADDRESS|TLS_.*|(ROUTER|PREFILL)_NAME|ROUTER_ADMIN_HOST|PREFILL_HOST|POOL_CONTROL_HOST))$" $name -}}
{{ fail (printf "%s.extraEnv has %s, which the chart sets itself; leave it out" $where $name) }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuer) -}}
{{ fail "tls.certManager.issuer is empty; name the Issuer or ClusterIssuer" }}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.enabled) -}}
{{ fail "tls.certManager.enabled is true and tls.enabled is false; a certificate would be made that nobody uses" }}
{{- end -}}
{{- if and .Values.router.ingress.enabled (not .Values.router.ingress.host) -}}
{{ fail "router.ingress.host is empty; name the host" }}
{{- end -}}
{{- if and .Values.router.gateway.enabled (not .Values.router.gateway.name) -}}
{{ fail "router.gateway.name is empty; name the Gateway" }}
{{- end -}}
{{- range $role := list "router" "prefill" -}}
{{- $scaling := (index $.Values $role).autoscaling -}}
{{- if gt (int $scaling.min) (int $scaling.max) -}}
{{ fail (printf "%s.autoscaling.min is %d and max is %d; min may be at most max" $role (int $scaling.min) (int $scaling.max)) }}
{{- end -}}
{{- end -}}
{{- if and (ne .Values.prefill.autoscaling.kind "none") (not .Values.prefill.replicas) -}}
{{ fail (printf "prefill.autoscaling.kind is %s and prefill.replicas is 0, which leaves prefill workers out; leave out one of them" .Values.prefill.autoscaling.kind) }}
{{- end -}}
{{- if and .Values.router.gateway.caConfigMap (not .Values.tls.enabled) -}}
{{ fail "router.gateway.caConfigMap is set and tls.enabled is false: the gateway would speak TLS to doors that do not" }}
{{- end -}}
{{- if and .Values.router.gateway.grpcHost (eq .Values.router.gateway.grpcHost .Values.router.gateway.host) -}}
{{ fail "router.gateway.grpcHost is router.gateway.host: a Gateway accepts one kind of route per host name; give the gRPC door another one" }}
{{- end -}}
{{- if and .Values.router.gateway.grpcHost (not .Values.router.gateway.host) -}}
{{ fail "router.gateway.host is empty and grpcHost is not: without a host name the HTTPRoute would take that one too; name both" }}
{{- end -}}
{{- if and .Values.auth.tenantsSecret .Values.metrics.serviceMonitor.enabled (not .Values.metrics.serviceMonitor.keySecret) -}}
{{ fail "metrics.serviceMonitor.keySecret is empty and auth.tenantsSecret is not: /metrics asks for a key too; make a tenant for Prometheus, and name the Secret with its key" }}
{{- end -}}
{{- range $role := list "router" "prefill" -}}
{{- if and (eq (index $.Values $role).autoscaling.kind "keda") (not $.Values.metrics.serviceMonitor.enabled) -}}
{{ fail (printf "%s.autoscaling.kind is keda and metrics.serviceMonitor.enabled is false: KEDA would ask Prometheus for what it does not have; enable it" $role) }}
{{- end -}}
{{- end -}}
{{- $given := dict "commonLabels" .Values.commonLabels "router.podLabels" .Values.router.podLabels "prefill.podLabels" .Values.prefill.podLabels -}}
{{- range $key, $labels := $given -}}
{{- range $label, $_ := $labels -}}
{{- if regexMatch "^(app\\.kubernetes\\.io/(name|part-of|instance|component|version|managed-by)|helm\\.sh/chart)$" $label -}}
{{ fail (printf "%s has %s, which is the chart's own: Services and policies select by such labels; leave it out" $key $label) }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (ne .Values.router.service.type "ClusterIP") (not .Values.auth.tenantsSecret) -}}
{{ fail (printf "router.service.type is %s and auth.tenantsSecret is empty: whoever reaches it could use the model; make a Secret with tenants (docs/routing.md), or leave ClusterIP" .Values.router.service.type) }}
{{- end -}}
{{- $fault := .Values.decode.ray.gcsFaultTolerance -}}
{{- if and $fault.enabled (not $fault.redisAddress) (not .Values.redis.bundled.enabled) -}}
{{ fail "decode.ray.gcsFaultTolerance.redisAddress is empty and no Redis is bundled; give host:port" }}
{{- end -}}
{{- if and .Values.redis.external.ca (not .Values.redis.existingSecret) -}}
{{ fail "redis.external.ca names a key of the Secret redis.existingSecret, which is empty; name the Secret" }}
{{- end -}}
{{- if and (eq .Values.router.service.type "ClusterIP") (ne (int .Values.router.service.grpcPort) 50051) -}}
{{ fail (printf "router.service.grpcPort is %d; with router.service.type ClusterIP that Service has no address of its own, and clients call the pods' port: leave 50051" (int .Values.router.service.grpcPort)) }}
{{- end -}}
{{- range $role, $settings := .Values.settings -}}
{{- range $key, $value := $settings -}}
{{- if regexMatch "^(host|(control_|admin_)host|port|(http_|admin_|control_|health_)port)$" $key -}}
{{ fail (printf "settings.%s.%s is the chart's own: Services, probes and policies go by it; leave it out" $role $key) }}
{{- end -}}
{{- if eq $key "drain_s" -}}
{{ fail (printf "settings.%s.drain_s is the chart's own; set %s.drainSeconds, which the pods' grace times follow" $role (eq $role "pool" | ternary "decode" $role)) }}
{{- end -}}
{{- if and (kindIs "string" $value) (regexMatch "://[^/@]*:[^/@]+@" $value) -}}
{{ fail (printf "settings.%s.%s holds a password, which a ConfigMap would show" $role $key) }}
{{- end -}}
{{- if or (kindIs "invalid" $value) (kindIs "map" $value) -}}
{{ fail (printf "settings.%s.%s has no value that a setting could have; write a string, a number, true, false or a list of strings" $role $key) }}
{{- end -}}
{{- if or (regexMatch "^(namespace|redis_url|tls_(cert|key|ca|server_name)|ray_address|keep_workers|follow_config|tenants_file)$" $key) (and (eq $role "pool") (regexMatch "^decode(_resources|_gpus)?$" $key)) -}}
{{ fail (printf "settings.%s.%s follows from the chart's other values; leave it out" $role $key) }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.redis.bundled.enabled .Values.redis.external.url -}}
{{ fail "redis.external.url is set and redis.bundled.enabled is true; set redis.bundled.enabled to false, or leave the URL out" }}
{{- end -}}
{{- if and .Values.redis.external.url (not (regexMatch "^rediss?://[^/]+(/[0-9]*)?$" .Values.redis.external.url)) -}}
{{ fail (printf "redis.external.url is %q; write redis://host:port/db, or rediss:// for TLS" .Values.redis.external.url) }}
{{- end -}}
{{- if and .Values.redis.external.ca (not (hasPrefix "rediss://" .Values.redis.external.url)) -}}
{{ fail "redis.external.ca names authorities, and redis.external.url is not rediss://: without TLS there is nobody to check" }}
{{- end -}}
{{- range $door := list "ingress" "gateway" -}}
{{- if and (index $.Values.router $door).enabled (not $.Values.auth.tenantsSecret) -}}
{{ fail (printf "router.%s.enabled is true and auth.tenantsSecret is empty: whoever reaches it could use the model; make a Secret with tenants (docs/routing.md)" $door) }}
{{- end -}}
{{- end -}}
{{- end -}}
