{{/*
The container of a central component. Arguments: root, component, args, values (extraEnv, resources, credentialsSecret), and
optionally port, portName, grpcPort, config (the suffix of its ConfigMap), env (more variables), receiver (the mount of credentialsSecret), and
as booleans: kafka (connects to it), store (uses it), writable (writes to it), prices (mounts them), scratch (has a directory).
*/}}
{{- define "gpuledger.container" -}}
{{- $fullname := include "gpuledger.fullname" .root -}}
{{- $chart := list -}}
{{- if .kafka }}{{ $chart = append $chart (include "gpuledger.kafkaUser" .) }}{{ end -}}
{{- if .store }}{{ $chart = append $chart (include "gpuledger.storeVariables" .root) }}{{ end -}}
{{- with .env }}{{ $chart = append $chart (toYaml .) }}{{ end -}}
{{- if .port }}{{ $chart = append $chart (include "gpuledger.webConfigVariable" .root | trim) }}{{ end -}}
{{- $chart = without $chart "" | join "\n" -}}
{{- $variables := include "gpuledger.variables" (dict "component" .component "chart" $chart "extraEnv" .values.extraEnv) -}}
{{- $secret := empty .store | ternary "" (include "gpuledger.storeSecret" .root) -}}
- name: {{ .component }}
  {{- include "gpuledger.imageOf" . | nindent 2 }}
  args: {{ .args | toJson }}
  {{- if .scratch }}
  # DuckDB spills data here that does not fit into memory.
  workingDir: /scratch
  {{- end }}
  {{- if or .kafka $secret }}
  envFrom:
    {{- if .kafka }}
    - configMapRef: {name: {{ $fullname }}-kafka}
    {{- end }}
    {{- $secret | nindent 4 }}
  {{- end }}
  {{- with $variables }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  {{- if .port }}
  ports:
    - name: {{ .portName | default "http" }}
      containerPort: {{ .port }}
    {{- with .grpcPort }}
    - name: grpc
      containerPort: {{ . }}
    {{- end }}
  {{- include "gpuledger.probes" . | nindent 2 }}
  {{- end }}
  resources: {{- toYaml .values.resources | nindent 4 }}
  {{- include "gpuledger.containerSecurity" . | nindent 2 }}
  {{- with include "gpuledger.mounts" . | trim }}
  volumeMounts:
    {{- . | nindent 4 }}
  {{- end }}
{{- end }}

{{- define "gpuledger.mounts" -}}
{{- if .config }}
- name: {{ .config }}
  mountPath: /etc/gpuledger
  readOnly: true
{{- end }}
{{- if .kafka }}
- name: kafka
  mountPath: /run/secrets/kafka
  readOnly: true
{{- end }}
{{- if .prices }}
- name: prices
  mountPath: /etc/gpuledger-prices
  readOnly: true
{{- end }}
{{- if .scratch }}
- name: scratch
  mountPath: /scratch
{{- end }}
{{- if and .store (include "gpuledger.volume" .root) }}
- name: store
  mountPath: /var/lib/gpuledger
  {{- if not .writable }}
  readOnly: true
  {{- end }}
{{- end }}
{{- if .values.credentialsSecret }}
- name: {{ .receiver }}
  mountPath: /run/secrets/{{ .receiver }}
  readOnly: true
{{- end }}
{{- if .port }}{{ include "gpuledger.webConfigMount" .root }}{{ end }}
{{- end }}

{{/* The volumes of a pod with this container and its `sidecars`. */}}
{{- define "gpuledger.volumes" -}}
{{- $volumes := include "gpuledger.containerVolumes" . -}}
{{- range .sidecars }}{{ $volumes = print $volumes (include "gpuledger.containerVolumes" .) }}{{ end -}}
{{- if .port }}{{ $volumes = print $volumes (include "gpuledger.webConfigVolume" .root) }}{{ end -}}
{{- if and .store (include "gpuledger.volume" .root) }}
{{- $volumes = printf "%s\n- name: store\n  persistentVolumeClaim: {claimName: %s-store}" $volumes (include "gpuledger.fullname" .root) -}}
{{- end -}}
{{- with $volumes | trim }}
volumes:
  {{- . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "gpuledger.containerVolumes" }}
{{- if .config }}
- name: {{ .config }}
  configMap: {name: {{ include "gpuledger.fullname" .root }}-{{ .config }}}
{{- end }}
{{- if .kafka }}
{{ include "gpuledger.kafkaVolume" . }}
{{- end }}
{{- if .prices }}
- name: prices
  configMap: {name: {{ include "gpuledger.fullname" .root }}-prices}
{{- end }}
{{- if .scratch }}
- name: scratch
  emptyDir: {sizeLimit: 10Gi}
{{- end }}
{{- if .values.credentialsSecret }}
- name: {{ .receiver }}
  secret: {secretName: {{ .values.credentialsSecret | quote }}}
{{- end }}
{{- end }}

{{/*
A central component: its Deployment and its Service. Arguments: those of its container, settings (the content of its ConfigMap), and
optionally replicas, scaled (whether KEDA sets the replicas), recreate, account (its service account), sidecars (the arguments of
further containers in its pod), balanced (whether its Service has an address of its own).
*/}}
{{- define "gpuledger.central" -}}
{{- $kafka := empty .kafka | ternary "" (include "gpuledger.kafkaVariables" .root) -}}
{{- $spread := or .scaled (gt (int (.replicas | default 1)) 1) -}}
{{- $settings := list .settings $kafka -}}
{{- range .sidecars }}{{ $settings = append $settings .settings }}{{ end -}}
apiVersion: apps/v1
kind: Deployment
metadata: {{- include "gpuledger.metadata" . | nindent 2 }}
spec:
  {{- if not .scaled }}
  replicas: {{ .replicas | default 1 }}
  {{- end }}
  {{- if .recreate }}
  strategy: {type: Recreate}
  {{- end }}
  selector:
    matchLabels: {{- include "gpuledger.selectorLabels" . | nindent 6 }}
  template:
    {{- include "gpuledger.podMetadata" (merge (dict "settings" (join "" $settings)) .) | nindent 4 }}
    spec:
      {{- with .account }}
      serviceAccountName: {{ . }}
      {{- end }}
      automountServiceAccountToken: {{ not (empty .account) }}
      {{- if $spread }}
      # Spread over nodes and zones if there are several. Only preferred, so that a single node can run all pods, and a
      # roll-out of as many pods as nodes does not need another node.
      affinity:
        podAntiAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
            - weight: 100
              podAffinityTerm:
                topologyKey: kubernetes.io/hostname
                labelSelector:
                  matchLabels: {{- include "gpuledger.selectorLabels" . | nindent 20 }}
      topologySpreadConstraints:
        - topologyKey: topology.kubernetes.io/zone
          maxSkew: 1
          whenUnsatisfiable: ScheduleAnyway
          # Only the pods of the same roll-out count, not the pods that it replaces.
          matchLabelKeys: [pod-template-hash]
          labelSelector:
            matchLabels: {{- include "gpuledger.selectorLabels" . | nindent 14 }}
      {{- end }}
      terminationGracePeriodSeconds: 20
      {{- include "gpuledger.centralPod" . | nindent 6 }}
      containers:
        {{- include "gpuledger.container" . | nindent 8 }}
        {{- range .sidecars }}{{ include "gpuledger.container" . | nindent 8 }}{{ end }}
      {{- include "gpuledger.volumes" . | nindent 6 }}
---
{{ include "gpuledger.service" . }}
{{- if $spread }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{- include "gpuledger.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  # Pods that are not ready may always be evicted; otherwise no node could be drained while Kafka is unavailable.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "gpuledger.selectorLabels" . | nindent 6 }}
{{- end }}
{{- end }}

{{/* The ConfigMap with a settings file. Arguments: root, component, name, file, settings. */}}
{{- define "gpuledger.settingsMap" -}}
apiVersion: v1
kind: ConfigMap
metadata: {{- include "gpuledger.metadata" . | nindent 2 }}
data:
  {{ .file }}: |
    {{- .settings | nindent 4 }}
{{- end }}

{{/*
The pod template of a job on the store. On a volume it runs on the node of the store's pod, because only that node can mount it.
Arguments: those of its container.
*/}}
{{- define "gpuledger.storeJob" -}}
{{ include "gpuledger.podMetadata" . }}
spec:
  automountServiceAccountToken: false
  restartPolicy: Never
  {{- include "gpuledger.centralPod" . | nindent 2 }}
  {{- if include "gpuledger.volume" .root }}
  affinity:
    podAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "gpuledger.selectorLabels" (dict "root" .root "component" "sink-store") | nindent 14 }}
  {{- end }}
  containers:
    {{- include "gpuledger.container" . | nindent 4 }}
  {{- include "gpuledger.volumes" . | nindent 2 }}
{{- end }}

{{/* A central component that can have several replicas, and its autoscaler. Arguments: those of the component, and lag (a metric). */}}
{{- define "gpuledger.scaled" -}}
{{- $autoscaling := .root.Values.autoscaling | default dict -}}
{{- $scaled := and (eq (toString $autoscaling.enabled) "true") (.root.Capabilities.APIVersions.Has "keda.sh/v1alpha1") -}}
{{- $replicas := .values.replicas | default 1 -}}
{{ include "gpuledger.central" (merge (dict "replicas" $replicas "scaled" $scaled) .) }}
{{- if $scaled }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {{- include "gpuledger.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    name: {{ include "gpuledger.fullname" .root }}-{{ .component }}
  minReplicaCount: {{ $replicas }}
  maxReplicaCount: {{ max $replicas (int $autoscaling.maxReplicas) }}
  triggers:
    - type: prometheus
      # `Value`, because the largest lag is not divided by the number of replicas.
      metricType: Value
      metadata:
        serverAddress: {{ $autoscaling.prometheusUrl | quote }}
        query: max({{ .lag }}{cluster="{{ .root.Values.cluster }}",component="{{ .component }}"})
        threshold: {{ include "gpuledger.text" $autoscaling.lagSeconds | quote }}
        # The number of replicas stays if Prometheus has no series.
        ignoreNullValues: "false"
{{- end }}
{{- end }}
