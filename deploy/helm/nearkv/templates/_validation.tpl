{{/* What the schema cannot say. Each message names the value and what to do. */}}
{{- define "nearkv.validate" -}}
{{- $agent := .Values.agent -}}
{{- if not .Values.image.registry -}}
{{- fail "image.registry: say where you pushed the images of deploy/images, such as registry.example.com/nearkv" -}}
{{- end -}}
{{- if and $agent.enabled (not $agent.runAsRoot) $agent.gpu.enabled $agent.gpu.podResources -}}
{{- fail "agent.gpu.podResources: the kubelet's socket is root's; set it to false, or agent.runAsRoot to true" -}}
{{- end -}}
{{- if and $agent.enabled $agent.rdma.enabled (not $agent.runAsRoot) -}}
{{- fail "agent.rdma.enabled: pinning memory takes IPC_LOCK, which Kubernetes gives to root only; set agent.runAsRoot to true" -}}
{{- end -}}
{{- if and $agent.rdma.required (not $agent.rdma.enabled) -}}
{{- fail "agent.rdma.required: set agent.rdma.enabled, too: without the devices no KV could move between nodes" -}}
{{- end -}}
{{- if and .Values.scheduler.enabled (not .Values.extender.enabled) -}}
{{- fail "scheduler.enabled: needs extender.enabled: a second scheduler without the extender places pods as the first one does" -}}
{{- end -}}
{{- if eq .Values.scheduler.name "default-scheduler" -}}
{{- fail "scheduler.name: default-scheduler is the cluster's own" -}}
{{- end -}}
{{- if and .Values.tls.enabled (not (include "nearkv.agentName" .)) (or .Values.ingress.enabled .Values.extender.enabled) -}}
{{- fail "tls.agentName: say what the agents' certificates are for, such as nearkv-agent.nearkv.svc" -}}
{{- end -}}
{{- if and .Values.tls.enabled .Values.extender.enabled (or .Values.extender.tls.existingSecret .Values.extender.tls.issuerRef.name) -}}
{{- fail "extender.tls: with tls.enabled the extender serves tls.extenderSecret; leave it out" -}}
{{- end -}}
{{- range .Values.ingress.agents -}}
{{- if and $.Values.tls.enabled (hasPrefix "http://" .) -}}
{{- fail (printf "ingress.agents: %s: with tls.enabled agents are asked over https" .) -}}
{{- end -}}
{{- end -}}
{{- if and (eq (include "nearkv.extender.tlsMode" .) "secret") (not .Values.tls.enabled) (not .Values.extender.tls.existingSecret) -}}
{{- fail "extender.tls.existingSecret: name the Secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if and (eq .Values.extender.tls.mode "cert-manager") (not .Values.extender.tls.issuerRef.name) -}}
{{- fail "extender.tls.issuerRef.name: name the issuer" -}}
{{- end -}}
{{- if hasKey (.Values.ingress.config.decisions | default dict) "file" -}}
{{- fail "ingress.config.decisions.file: it needs a volume; set ingress.decisionsFile.enabled instead" -}}
{{- end -}}
{{- range $component, $keys := dict "agent" (list "listen" "node") "extender" (list "listen" "tls") "ingress" (list "listen" "agents" "agent_service" "mode") -}}
{{- range $key := $keys -}}
{{- if hasKey (index $.Values $component).config $key -}}
{{- fail (printf "%s.config.%s: other objects depend on it; the chart sets it" $component $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
