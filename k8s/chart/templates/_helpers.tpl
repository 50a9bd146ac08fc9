{{/*
Parenthesized values, such as (.Values.http).webConfigSecret, and their defaults are for `helm upgrade --reuse-values`, with which the
values of an older release lack newer keys.
*/}}

{{/* Prefix of all names. 37 characters leave room for the longest suffix of a CronJob, whose name has at most 52. */}}
{{- define "gpuledger.fullname" -}}
{{- $name := .Values.fullnameOverride | default (contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name)) -}}
{{- $name | trunc 37 | trimSuffix "-" -}}
{{- end }}

{{/* Labels of selectors, which never change. `name` is fixed: it becomes the job of the metrics, and the alert rules need it. */}}
{{- define "gpuledger.releaseLabels" -}}
app.kubernetes.io/name: gpuledger
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "gpuledger.selectorLabels" -}}
{{ include "gpuledger.releaseLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Labels of an object without a component. */}}
{{- define "gpuledger.commonLabels" -}}
{{ include "gpuledger.releaseLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: gpuledger
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "gpuledger.labels" -}}
{{ include "gpuledger.commonLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Metadata of an object of a component; `name` may replace the component's. */}}
{{- define "gpuledger.metadata" -}}
name: {{ include "gpuledger.fullname" .root }}-{{ .name | default .component }}
namespace: {{ .root.Release.Namespace | quote }}
labels: {{- include "gpuledger.labels" . | nindent 2 }}
{{- end }}

{{- define "gpuledger.image" -}}
{{- with .root.Values.image.registry }}{{ . | trimSuffix "/" }}/{{ end -}}
{{ eq .component "agent" | ternary "gpuledger-agent" "gpuledger" }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* Whether the release installs the component `agent` or `podwatch`, or the other components, `central`. Empty if not. */}}
{{- define "gpuledger.installs" -}}
{{- $installed := dict
  "agent" (list "agent")
  "podwatch" (list "podwatch")
  "central" (list "podwatch" "central")
  "all" (list "agent" "podwatch" "central")
-}}
{{- if has .component (get $installed .root.Values.components) }}yes{{ end -}}
{{- end }}

{{/* Whether the store is on a volume, which only one node can mount. Empty if not. */}}
{{- define "gpuledger.volume" -}}
{{- if and .Values.sinkStore.enabled (not (.Values.store).uri) }}yes{{ end -}}
{{- end }}

{{/* Whether the reports are in the pod of the store, because they read its volume. Empty if not. */}}
{{- define "gpuledger.reportsWithStore" -}}
{{- if (.Values.reports).enabled -}}
{{- and (include "gpuledger.volume" .) (include "gpuledger.installs" (dict "root" . "component" "central")) -}}
{{- end -}}
{{- end }}

{{/* The brokers: the user's, or the chart's own for a trial. Empty: no Kafka. */}}
{{- define "gpuledger.bootstrapServers" -}}
{{- if (.Values.kafka.trial).enabled -}}
{{ include "gpuledger.fullname" . }}-kafka.{{ .Release.Namespace }}.svc:9092
{{- else -}}
{{ .Values.kafka.bootstrapServers }}
{{- end }}
{{- end }}

{{/* A number or text as a text. Helm reads numbers of values files as floats, whose texts have exponents. */}}
{{- define "gpuledger.text" -}}
{{ kindIs "string" . | ternary . (toJson .) }}
{{- end }}

{{/* The variables of all components that connect to the brokers. */}}
{{- define "gpuledger.kafkaVariables" -}}
GPULEDGER_KAFKA__BOOTSTRAP_SERVERS: {{ include "gpuledger.bootstrapServers" . | quote }}
{{- with .Values.kafka }}
{{- if ne .securityProtocol "PLAINTEXT" }}
GPULEDGER_KAFKA__SECURITY_PROTOCOL: {{ .securityProtocol }}
{{- end }}
{{- if hasPrefix "SASL_" .securityProtocol }}
GPULEDGER_KAFKA__SASL_MECHANISM: {{ .saslMechanism }}
{{- if ne .saslMechanism "OAUTHBEARER" }}
GPULEDGER_KAFKA__SASL_PASSWORD_FILE: /run/secrets/kafka/password
{{- else if .tokenUrl }}
GPULEDGER_KAFKA__OAUTH__TOKEN_URL: {{ .tokenUrl | quote }}
GPULEDGER_KAFKA__OAUTH__CLIENT_SECRET_FILE: /run/secrets/kafka/password
{{- else }}
GPULEDGER_KAFKA__OAUTH__TOKEN_FILE: /run/secrets/kafka/token
{{- end }}
{{- end }}
{{- if and .caSecret (hasSuffix "SSL" .securityProtocol) }}
GPULEDGER_KAFKA__SSL_CA_FILE: /run/secrets/kafka/ca.crt
{{- end }}
{{- if and .clientCertificates (hasSuffix "SSL" .securityProtocol) }}
GPULEDGER_KAFKA__SSL_CERT_FILE: /run/secrets/kafka/tls.crt
GPULEDGER_KAFKA__SSL_KEY_FILE: /run/secrets/kafka/tls.key
{{- end }}
{{- range $name, $value := .env }}
{{ $name }}: {{ include "gpuledger.text" $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* A component's user. A Secret that the protocol needs is not optional, so that the pod's events name it if it is missing. */}}
{{- define "gpuledger.kafkaUser" -}}
{{- with .root.Values.kafka -}}
{{- $tokens := eq .saslMechanism "OAUTHBEARER" -}}
- name: GPULEDGER_KAFKA__{{ $tokens | ternary "OAUTH__CLIENT_ID" "SASL_USERNAME" }}
  valueFrom:
    secretKeyRef:
      name: {{ .loginSecretPrefix }}-{{ $.component }}
      key: username
      optional: {{ not (and (hasPrefix "SASL_" .securityProtocol) (or .tokenUrl (not $tokens))) }}
{{- end }}
{{- end }}

{{/* CA certificates of the brokers, and the component's own credentials. */}}
{{- define "gpuledger.kafkaVolume" -}}
{{- with .root.Values.kafka -}}
- name: kafka
  projected:
    sources:
      {{- if .caSecret }}
      - secret: {name: {{ .caSecret | quote }}, optional: {{ not (hasSuffix "SSL" .securityProtocol) }}}
      {{- end }}
      - secret:
          name: {{ .loginSecretPrefix }}-{{ $.component }}
          optional: {{ not (or (hasPrefix "SASL_" .securityProtocol) .clientCertificates) }}
{{- end }}
{{- end }}

{{/*
The chart's settings of a component, merged with the user's. Arguments: path (the name of the value with the user's settings),
userSettings, chartSettings, valueOf (settings that the user must not set, with the values that set them; empty: no value does).
*/}}
{{- define "gpuledger.settings" -}}
{{- $user := .userSettings | default dict -}}
{{- $path := .path -}}
{{- $ofAll := dict
  "http.listen" ""
  "kafka.bootstrap_servers" "kafka.bootstrapServers"
  "kafka.security_protocol" "kafka.securityProtocol"
  "kafka.sasl_mechanism" "kafka.saslMechanism"
-}}
{{- range $setting, $instead := merge (.valueOf | default dict) $ofAll -}}
  {{- $value := $user -}}
  {{- range splitList "." $setting -}}
    {{- if kindIs "map" $value }}{{ $value = get $value . }}{{ else }}{{ $value = "" }}{{ end -}}
  {{- end -}}
  {{- if not (or (kindIs "invalid" $value) (eq (toString $value) "")) -}}
    {{- $remedy := empty $instead | ternary "remove it" (printf "set the value %s instead" $instead) -}}
    {{- fail (printf "%s.%s: the chart sets this setting; %s" $path $setting $remedy) -}}
  {{- end -}}
{{- end -}}
{{- mergeOverwrite .chartSettings (deepCopy $user) | toYaml -}}
{{- end }}

{{/* The probes of a container. The kubelet does not verify certificates, and /livez and /readyz require no password. */}}
{{- define "gpuledger.probes" -}}
{{- $scheme := empty (.root.Values.http).webConfigSecret | ternary "" ", scheme: HTTPS" -}}
{{- $port := .portName | default "http" -}}
# Starting takes half a second on a free core; two minutes allow for a busy node.
startupProbe:
  httpGet: {path: /livez, port: {{ $port }}{{ $scheme }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /livez, port: {{ $port }}{{ $scheme }}}
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: {{ $port }}{{ $scheme }}}
  timeoutSeconds: 5
{{- end }}

{{- define "gpuledger.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Metadata of pods. If `settings` changes, the pods restart, because components read their settings only at the start. */}}
{{- define "gpuledger.podMetadata" -}}
metadata:
  labels:
    {{- include "gpuledger.selectorLabels" . | nindent 4 }}
    {{- with .root.Values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- if or .settings .root.Values.podAnnotations }}
  annotations:
    {{- with .settings }}
    checksum/settings: {{ sha256sum . }}
    {{- end }}
    {{- with .root.Values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
{{- end }}

{{/* Placement and users of central pods. */}}
{{- define "gpuledger.centralPod" -}}
{{- if and .store (.root.Values.store).serviceAccountName }}
serviceAccountName: {{ .root.Values.store.serviceAccountName | quote }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.central.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .root.Values.central.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.central.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  {{- if and .store (include "gpuledger.volume" .root) }}
  fsGroup: 65532
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "gpuledger.imageOf" -}}
image: {{ include "gpuledger.image" . }}
{{- with .root.Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* A Service, by default headless, which also contains pods that are not ready. `pod`: the component of the selected pods. */}}
{{- define "gpuledger.service" -}}
apiVersion: v1
kind: Service
metadata: {{- include "gpuledger.metadata" . | nindent 2 }}
spec:
  {{- if not .balanced }}
  clusterIP: None
  {{- end }}
  selector: {{- include "gpuledger.selectorLabels" (dict "root" .root "component" (.pod | default .component)) | nindent 4 }}
  ports:
    - name: http
      port: {{ .port }}
      targetPort: {{ .portName | default "http" }}
    {{- with .grpcPort }}
    - name: grpc
      port: {{ . }}
      targetPort: grpc
    {{- end }}
{{- end }}

{{/*
The variables of a container: the chart's, as a text, and extraEnv. The API server loses changes of a variable that is in the list
twice.
*/}}
{{- define "gpuledger.variables" -}}
{{- $names := dict -}}
{{- range concat (fromYamlArray .chart) (.extraEnv | default list) -}}
  {{- if hasKey $names .name }}{{ fail (printf "extraEnv of %s: %s is already set; remove it" $.component .name) }}{{ end -}}
  {{- $_ := set $names .name true -}}
{{- end -}}
{{- .chart | trim }}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* HTTP endpoints over TLS, with a password for all except the probes: the variable, the mount and the volume. */}}
{{- define "gpuledger.webConfigVariable" -}}
{{- if (.Values.http).webConfigSecret }}
- {name: GPULEDGER_HTTP__WEB_CONFIG_FILE, value: /run/secrets/web/web.yml}
{{- end }}
{{- end }}

{{- define "gpuledger.webConfigMount" -}}
{{- if (.Values.http).webConfigSecret }}
- name: web
  mountPath: /run/secrets/web
  readOnly: true
{{- end }}
{{- end }}

{{- define "gpuledger.webConfigVolume" -}}
{{- with (.Values.http).webConfigSecret }}
- name: web
  secret: {secretName: {{ . | quote }}}
{{- end }}
{{- end }}

{{/* The store: its URI and options, and the Secret with credentials as variables, for every program that uses it. */}}
{{- define "gpuledger.storeVariables" -}}
- {name: GPULEDGER_STORE__URI, value: {{ (.Values.store).uri | default "/var/lib/gpuledger/store" | quote }}}
{{- with (.Values.store).options }}
- name: GPULEDGER_STORE__STORAGE_OPTIONS
  value: {{ toJson . | quote }}
{{- end }}
{{- end }}

{{- define "gpuledger.storeSecret" -}}
{{- with (.Values.store).credentialsSecret }}
- secretRef: {name: {{ . | quote }}}
{{- end }}
{{- end }}
