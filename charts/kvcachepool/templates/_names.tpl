{{/*
Names are not made from the release: one installation per cluster, since there is one CRD and one webhook configuration. The operator finds
its Lease, its CA Secret and its webhook configuration by their names, so fullnameOverride leaves these alone.
*/}}

{{- define "kvcachepool.name" -}}
{{ .Values.nameOverride | default .Chart.Name }}
{{- end }}

{{- define "kvcachepool.fullname" -}}
{{ .Values.fullnameOverride | default (include "kvcachepool.name" .) }}
{{- end }}

{{- define "kvcachepool.operator" -}}
{{ include "kvcachepool.fullname" . }}-operator
{{- end }}

{{- define "kvcachepool.webhook" -}}
{{ include "kvcachepool.fullname" . }}-webhook
{{- end }}

{{- define "kvcachepool.selector" -}}
{{ dict "app.kubernetes.io/name" (include "kvcachepool.name" .) "app.kubernetes.io/component" "operator" | toYaml }}
{{- end }}

{{- define "kvcachepool.labels" -}}
{{ include "kvcachepool.labelsWith" (list . dict) }}
{{- end }}

{{/* [root, more labels of this object]: they yield to those of all objects, which selectors read, and take precedence over commonLabels. */}}
{{- define "kvcachepool.labelsWith" -}}
{{- with index . 0 -}}
{{ merge (include "kvcachepool.selector" . | fromYaml) (dict
  "app.kubernetes.io/instance" .Release.Name
  "app.kubernetes.io/version" .Chart.AppVersion
  "app.kubernetes.io/managed-by" .Release.Service
  "helm.sh/chart" (printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_"))
) (index $ 1 | default dict) (.Values.commonLabels | default dict) | toYaml }}
{{- end }}
{{- end }}

{{- define "kvcachepool.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "kvcachepool.operator" .) }}
{{- else -}}
{{ required "serviceAccount.name names the ServiceAccount that serviceAccount.create=false expects" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* A registry of all charts takes the place of this chart's own. */}}
{{- define "kvcachepool.image" -}}
{{- with .Values.image -}}
{{ with $.Values.global.imageRegistry | default .registry }}{{ . }}/{{ end }}{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "kvcachepool.imagePullSecrets" -}}
{{- with concat .Values.global.imagePullSecrets .Values.imagePullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ if kindIs "string" . }}{{ . }}{{ else }}{{ .name }}{{ end }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Secret with the webhook's certificate, if the operator does not create its own. */}}
{{- define "kvcachepool.certificateSecret" -}}
{{- if eq .Values.pki.mode "cert-manager" -}}
{{ include "kvcachepool.webhook" . }}-tls
{{- else -}}
{{ required "pki.external.secretName names the Secret with tls.crt and tls.key" .Values.pki.external.secretName }}
{{- end }}
{{- end }}
