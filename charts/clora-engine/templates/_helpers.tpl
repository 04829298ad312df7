{{/* The name is also the Service's: what Kubernetes would refuse there is refused here, in words. */}}
{{- define "clora-engine.name" -}}
{{- $name := default .Release.Name .Values.nameOverride }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$" $name) }}
{{- fail (printf "nameOverride: an engine cannot be called %q: at most 50 of a-z, 0-9 and '-', a letter first" $name) }}
{{- end }}
{{- if and (gt (int (dig "trainer" "nodes" 1 .Values.spec)) 1) (gt (len $name) 44) }}
{{- fail (printf "nameOverride: an engine of several pods (spec.trainer.nodes) cannot be called %q: at most 44 characters" $name) }}
{{- end }}
{{- $name }}
{{- end }}

{{- define "clora-engine.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: clora
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* [registry/]repository:tag, or @digest, which says more than a tag. */}}
{{- define "clora-engine.image" -}}
{{- with .image }}
{{- with .registry }}{{ trimSuffix "/" . }}/{{ end }}
{{- .repository }}
{{- empty .digest | ternary (printf ":%s" (default $.tag .tag)) (printf "@%s" .digest) }}
{{- end }}
{{- end }}

{{/* As JSON. What the release says is laid over the preset; an engine at an endpoint needs neither image nor pod. */}}
{{- define "clora-engine.spec" -}}
{{- $preset := dict }}
{{- with .Values.preset }}
{{- $preset = $.Files.Get (printf "files/presets/%s.yaml" .) | fromYaml }}
{{- end }}
{{- if .Values.spec.endpoint }}
{{- $preset = omit $preset "podTemplate" }}
{{- else }}
{{- $tag := eq .Values.preset "cpu" | ternary (printf "%s-cpu" .Chart.AppVersion) .Chart.AppVersion }}
{{- $_ := set $preset "image" (include "clora-engine.image" (dict "image" .Values.image "tag" $tag)) }}
{{- with .Values.imagePullSecrets }}
{{- $pod := dict "podTemplate" (dict "spec" (dict "imagePullSecrets" .)) }}
{{- $preset = mergeOverwrite $preset $pod }}
{{- end }}
{{- end }}
{{- mergeOverwrite $preset (deepCopy .Values.spec) | toJson }}
{{- end }}
