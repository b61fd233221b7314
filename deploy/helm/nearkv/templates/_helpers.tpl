{{- define "nearkv.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "nearkv.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "nearkv.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "nearkv.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels by which pods of a component are selected: (list . "agent"). */}}
{{- define "nearkv.selectorLabels" -}}
{{- $top := index . 0 -}}
app.kubernetes.io/name: {{ include "nearkv.name" $top }}
app.kubernetes.io/instance: {{ $top.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of every object: (list . "agent"). */}}
{{- define "nearkv.labels" -}}
{{- $top := index . 0 -}}
{{ include "nearkv.selectorLabels" . }}
app.kubernetes.io/version: {{ $top.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: nearkv
app.kubernetes.io/managed-by: {{ $top.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $top.Chart.Name $top.Chart.Version | replace "+" "_" }}
{{- with $top.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* An image of ours: (list . .Values.agent.image). */}}
{{- define "nearkv.image" -}}
{{- $top := index . 0 -}}
{{- $image := index . 1 -}}
{{- $name := printf "%s/%s" (trimSuffix "/" $top.Values.image.registry) $image.repository -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name ($image.tag | default $top.Values.image.tag | default $top.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "nearkv.authSecret" -}}
{{- .Values.auth.existingSecret | default (printf "%s-auth" (include "nearkv.fullname" .)) -}}
{{- end -}}

{{/* A variable from the Secret of tokens: (list . "NEARKV_AGENT_TOKEN" "agent-token"). */}}
{{- define "nearkv.secretEnv" -}}
- name: {{ index . 1 }}
  valueFrom:
    secretKeyRef: {name: {{ include "nearkv.authSecret" (index . 0) }}, key: {{ index . 2 }}}
{{- end -}}

{{/* Secrets of TLS: (list . "agent"), reader, extender. */}}
{{- define "nearkv.tlsSecret" -}}
{{- $top := index . 0 -}}
{{- get $top.Values.tls (printf "%sSecret" (index . 1)) | default (printf "%s-%s-tls" (include "nearkv.fullname" $top) (index . 1)) -}}
{{- end -}}

{{/* The Service of the agents that the ingress follows, as name and namespace; {} for none. */}}
{{- define "nearkv.followedService" -}}
{{- $host := .Values.ingress.agentService | default (ternary (printf "%s-agent.%s" (include "nearkv.fullname" .) .Release.Namespace) "" .Values.agent.enabled) -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.agents) $host -}}
{{- $parts := splitList "." $host -}}
{{- dict "name" (first $parts) "namespace" (first (concat (rest $parts) (list .Release.Namespace))) | toYaml -}}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{/* What agents' certificates are for. */}}
{{- define "nearkv.agentName" -}}
{{- if .Values.tls.agentName -}}
{{- .Values.tls.agentName -}}
{{- else if .Values.agent.enabled -}}
{{- printf "%s-agent.%s.svc" (include "nearkv.fullname" .) .Release.Namespace -}}
{{- else -}}
{{- .Values.ingress.agentService -}}
{{- end -}}
{{- end -}}

{{/* What all our containers that need no more run with. */}}
{{- define "nearkv.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "nearkv.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Seconds between SIGTERM and SIGKILL: the sleep before, the drain, and 10 to close. */}}
{{- define "nearkv.graceSeconds" -}}
{{- $drain := index . 0 -}}
{{- $before := index . 1 -}}
{{- add (ceil (float64 $drain)) $before 10 -}}
{{- end -}}

{{/* Replicas apart, if possible: (list . "extender"). */}}
{{- define "nearkv.apart" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- include "nearkv.selectorLabels" . | nindent 12 }}
{{- end -}}

{{/* Probes of a component: (list "HTTP" "http"). Liveness is the event loop alone: restarting it
     because a peer is away helps nobody. */}}
{{- define "nearkv.probes" -}}
{{- $scheme := index . 0 -}}
{{- $port := index . 1 -}}
startupProbe:
  httpGet: {path: /livez, port: {{ $port }}, scheme: {{ $scheme }}}
  periodSeconds: 2
  failureThreshold: 30
livenessProbe:
  httpGet: {path: /livez, port: {{ $port }}, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: {{ $port }}, scheme: {{ $scheme }}}
  periodSeconds: 3
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}

{{/* The key that engines want, if any: (list . "NEARKV_INGRESS_ENGINE_API_KEY"). */}}
{{- define "nearkv.engineKeyEnv" -}}
{{- with (index . 0).Values.auth.engineApiKeySecret -}}
- name: {{ index $ 1 }}
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: api-key}
{{- end -}}
{{- end -}}
