{{- define "nearkv.scheduler.config" -}}
{{- $scheduler := .Values.scheduler -}}
{{- $tls := ne (include "nearkv.extender.tlsMode" .) "off" -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection:
  leaderElect: true
  # Not kube-scheduler: the cluster's own scheduler holds that lease.
  resourceName: {{ $scheduler.name }}
  resourceNamespace: {{ .Release.Namespace }}
profiles:
  - schedulerName: {{ $scheduler.name }}
    percentageOfNodesToScore: {{ $scheduler.percentageOfNodesToScore }}
extenders:
  - urlPrefix: {{ ternary "https" "http" $tls }}://{{ include "nearkv.fullname" . }}-extender.{{ .Release.Namespace }}.svc:9473/v1
    {{- if $scheduler.filter }}
    filterVerb: filter
    {{- end }}
    prioritizeVerb: prioritize
    weight: {{ $scheduler.weight }}
    httpTimeout: {{ $scheduler.httpTimeout }}
    # Node names instead of whole nodes.
    nodeCacheCapable: true
    # Pods are placed without scores while the extender is away.
    ignorable: true
    {{- if $tls }}
    enableHTTPS: true
    tlsConfig:
      caFile: /etc/nearkv-tls/ca.crt
    {{- end }}
    # Other pods are not sent.
    managedResources:
      {{- range $scheduler.managedResources }}
      - name: {{ . }}
      {{- end }}
{{- end -}}
