{{/*
Names are fixed, not made from the release: one installation per cluster, since there is one CRD and one webhook configuration.
*/}}

{{- define "kvcachepool.selector" -}}
app.kubernetes.io/name: kvcachepool
app.kubernetes.io/component: operator
{{- end }}

{{- define "kvcachepool.labels" -}}
{{ include "kvcachepool.selector" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvcachepool.serviceAccount" -}}
{{ .Values.serviceAccount.name | default "kvcachepool-operator" }}
{{- end }}

{{- define "kvcachepool.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{/* Secret with the webhook's certificate, if the operator does not create its own. */}}
{{- define "kvcachepool.certificateSecret" -}}
{{- if eq .Values.pki.mode "cert-manager" -}}
kvcachepool-webhook-tls
{{- else -}}
{{ required "pki.external.secretName names the Secret with tls.crt and tls.key" .Values.pki.external.secretName }}
{{- end }}
{{- end }}

{{- define "kvcachepool.restricted" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: true
{{- end }}
