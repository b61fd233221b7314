{{/* The settings files of the components: what the chart knows, under what the values say. */}}

{{- define "nearkv.agent.settings" -}}
{{- $agent := .Values.agent -}}
{{- $transfer := dict -}}
{{- if $agent.transfer.enabled -}}
{{- $transfer = dict "socket_dir" $agent.transfer.socketDir "peer_listen" "0.0.0.0:9471" "require_rdma" $agent.rdma.required -}}
{{- $probes := include "nearkv.probeLevels" . | fromYaml -}}
{{- $_ := set $transfer "probes" (merge $probes (dict "service" (printf "%s-agent" (include "nearkv.fullname" .)) "namespace" .Release.Namespace)) -}}
{{- with $agent.transfer.allowedUids -}}
{{- $own := ternary 0 65532 $agent.runAsRoot -}}
{{- $_ := set $transfer "allowed_uids" (concat (list $own 0) . | uniq) -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- $_ := set $transfer "peer_tls" (dict "cert" "/etc/nearkv-tls/tls.crt" "key" "/etc/nearkv-tls/tls.key" "ca" "/etc/nearkv-tls/ca.crt" "name" (include "nearkv.agentName" .)) -}}
{{- end -}}
{{- end -}}
{{- $links := dict "enabled" $agent.links.hostSys "root" "/host" -}}
{{- $gpu := dict "enabled" (ternary "auto" "off" $agent.gpu.enabled) -}}
{{- $settings := dict
    "log_level" $agent.logLevel
    "listen" "0.0.0.0:9470"
    "transfer" $transfer
    "links" $links
    "gpu" $gpu
    "waking" (dict "enabled" (and $agent.waking.enabled $agent.gpu.enabled))
    "drain_seconds" 5 -}}
{{- if .Values.tls.enabled -}}
{{- $_ := set $settings "tls" (dict "cert" "/etc/nearkv-tls/tls.crt" "key" "/etc/nearkv-tls/tls.key" "client_ca" "/etc/nearkv-tls/ca.crt") -}}
{{- end -}}
{{- if not $agent.workerStatus.enabled -}}
{{- $_ := set $settings "worker_status" (dict "enabled" "off") -}}
{{- end -}}
{{- toYaml (mergeOverwrite $settings (deepCopy $agent.config)) -}}
{{- end -}}

{{/* How agents are asked over TLS, by whoever has the readers' certificate. */}}
{{- define "nearkv.readerTls" -}}
{{- dict "ca" "/etc/nearkv-agents-tls/ca.crt" "cert" "/etc/nearkv-agents-tls/tls.crt" "key" "/etc/nearkv-agents-tls/tls.key" "name" (include "nearkv.agentName" .) | toYaml -}}
{{- end -}}

{{- define "nearkv.extender.settings" -}}
{{- $extender := .Values.extender -}}
{{- $agents := dict -}}
{{- if .Values.agent.enabled -}}
{{- $selector := list -}}
{{- range $key, $value := include "nearkv.selectorLabels" (list . "agent") | fromYaml -}}
{{- $selector = append $selector (printf "%s=%s" $key $value) -}}
{{- end -}}
{{- $agents = dict "selector" (join "," $selector) "namespace" .Release.Namespace -}}
{{- if .Values.tls.enabled -}}
{{- $agents = merge $agents (dict "scheme" "https" "tls" (include "nearkv.readerTls" . | fromYaml)) -}}
{{- end -}}
{{- end -}}
{{- $settings := dict
    "log_level" $extender.logLevel
    "listen" "0.0.0.0:9473"
    "agents" $agents
    "kubernetes" (dict "managed_resources" .Values.scheduler.managedResources "worker_statuses" .Values.agent.workerStatus.enabled)
    "distance" (dict "preset" $extender.distancePreset)
    "limits" (dict "max_body_bytes" 16777216 "max_bodies_bytes" 268435456)
    "drain_seconds" 10 -}}
{{- if ne (include "nearkv.extender.tlsMode" .) "off" -}}
{{- $_ := set $settings "tls" (dict "cert" "/etc/nearkv-tls/tls.crt" "key" "/etc/nearkv-tls/tls.key") -}}
{{- end -}}
{{- toYaml (mergeOverwrite $settings (deepCopy $extender.config)) -}}
{{- end -}}

{{- define "nearkv.ingress.settings" -}}
{{- $ingress := .Values.ingress -}}
{{- $settings := dict
    "log_level" $ingress.logLevel
    "listen" "0.0.0.0:8080"
    "drain_seconds" 30 -}}
{{- with $ingress.agents -}}
{{- $_ := set $settings "agents" . -}}
{{- end -}}
{{- with include "nearkv.followedService" . | fromYaml -}}
{{- $_ := set $settings "agent_service" (merge (dict "scheme" (ternary "https" "http" $.Values.tls.enabled)) .) -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- $_ := set $settings "agent_tls" (include "nearkv.readerTls" . | fromYaml) -}}
{{- end -}}
{{- if $ingress.tenantsSecret -}}
{{- $_ := set $settings "tenants" (dict "file" "/etc/nearkv-tenants/tenants.yaml") -}}
{{- end -}}
{{- if $ingress.decisionsFile.enabled -}}
{{- $_ := set $settings "decisions" (dict "file" "/var/lib/nearkv/decisions/decisions.jsonl") -}}
{{- end -}}
{{- with $ingress.extProc -}}
{{- if .enabled -}}
{{- $picker := dict "listen" "0.0.0.0:9002" -}}
{{- if .pool -}}
{{- $_ := set $picker "pool" (dict "name" .pool "namespace" $.Release.Namespace) -}}
{{- end -}}
{{- if .tlsSecret -}}
{{- $_ := set $picker "tls" (dict "cert" "/etc/nearkv-tls/tls.crt" "key" "/etc/nearkv-tls/tls.key") -}}
{{- end -}}
{{- $_ := set $settings "mode" "ext-proc" -}}
{{- $_ := set $settings "ext_proc" $picker -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite $settings (deepCopy $ingress.config)) -}}
{{- end -}}

{{/* Room for the files of decisions: those kept, the one that is written, and one to spare. */}}
{{- define "nearkv.decisionsSize" -}}
{{- $ingress := .Values.ingress -}}
{{- $own := $ingress.config.decisions | default dict -}}
{{- $files := int64 (get $own "files_kept" | default 4) | add 2 -}}
{{- $bytes := mul $files (int64 (get $own "file_bytes" | default 67108864)) -}}
{{- $ingress.decisionsFile.sizeLimit | default (printf "%dMi" (div (add $bytes 1048575) 1048576)) -}}
{{- end -}}

{{/* Settings that the chart owns, because other objects have to agree with them. */}}
{{- define "nearkv.extender.tlsMode" -}}
{{- ternary "secret" .Values.extender.tls.mode .Values.tls.enabled -}}
{{- end -}}

{{- define "nearkv.extender.tlsSecret" -}}
{{- if .Values.tls.enabled -}}
{{- include "nearkv.tlsSecret" (list . "extender") -}}
{{- else if eq .Values.extender.tls.mode "secret" -}}
{{- .Values.extender.tls.existingSecret -}}
{{- else -}}
{{- include "nearkv.fullname" . }}-extender-tls
{{- end -}}
{{- end -}}
