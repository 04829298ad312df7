{{- define "clora.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The release's name, with the chart's unless it holds it already; at most 52 characters, for suffixes follow. */}}
{{- define "clora.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- $name := include "clora.name" . }}
{{- (contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name)) | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "clora.selectorLabels" -}}
app.kubernetes.io/name: {{ include "clora.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "clora.labels" -}}
{{ include "clora.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: clora
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "clora.serviceAccountName" -}}
{{- .Values.serviceAccount.create | ternary (default (include "clora.fullname" .) .Values.serviceAccount.name) (default "default" .Values.serviceAccount.name) }}
{{- end }}

{{/*
What the operator does, verb by verb. It creates and applies the children of engines and never deletes one: owner
references do. Secrets are read for the tokens that engines refer to; by name alone, they cannot be listed.
*/}}
{{- define "clora.rules" -}}
- apiGroups: [clora.dev]
  resources: [loraengines]
  verbs: [get, list, watch]
- apiGroups: [clora.dev]
  resources: [loraexperiments]
  verbs: [get, list, watch, patch]
- apiGroups: [clora.dev]
  resources: [loraengines/status, loraexperiments/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [services, persistentvolumeclaims]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [""]
  resources: [configmaps, pods]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}
