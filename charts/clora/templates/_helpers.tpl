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

{{/* JSON: who may reach the engines. The operator's own pods, by the name that every namespace carries as a label. */}}
{{- define "clora.engineIngressFrom" -}}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace) }}
{{- $pod := dict "matchLabels" (include "clora.selectorLabels" . | fromYaml) }}
{{- concat (list (dict "namespaceSelector" $namespace "podSelector" $pod)) .Values.networkPolicy.engines.from | toJson }}
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

{{/* [registry/]repository:tag, or @digest, which says more than a tag. */}}
{{- define "clora.image" -}}
{{- with .Values.image }}
{{- with .registry }}{{ trimSuffix "/" . }}/{{ end }}
{{- .repository }}
{{- empty .digest | ternary (printf ":%s" (default $.Chart.AppVersion .tag)) (printf "@%s" .digest) }}
{{- end }}
{{- end }}

{{/* What the pods of the operator, the uninstall hook and the tests have in common. */}}
{{- define "clora.pod" -}}
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.extraVolumes }}
volumes:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The same of their containers; the environment apart, for the operator's is longer. */}}
{{- define "clora.container" -}}
image: {{ include "clora.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- with .Values.command }}
command:
  {{- toYaml . | nindent 2 }}
{{- end }}
resources:
  {{- toYaml .Values.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- with .Values.extraVolumeMounts }}
volumeMounts:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "clora.env" -}}
# Nothing is written but the log.
- name: PYTHONDONTWRITEBYTECODE
  value: "1"
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of what helm makes beside the release: none that the operator's Deployment or Service would select. */}}
{{- define "clora.hookLabels" -}}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: clora
app.kubernetes.io/managed-by: {{ .context.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .context.Chart.Name .context.Chart.Version | replace "+" "_" }}
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
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [services, persistentvolumeclaims]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get]
- apiGroups: [""]
  resources: [pods]
  verbs: [list]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- if .Values.networkPolicy.engines.enabled }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, patch]
{{- end }}
{{- end }}
